"""What a deployment decides: the engine, who drafts, and a few habits; kept as parameters of config.pbtxt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.implementation import PluginImpl
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.speculation.drafter import draft_room

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.llm import LLM

#: A folder inside the version folder of the model, rather than anywhere on the machine.
INSIDE = "./"


@dataclass(frozen=True)
class ServingOptions:
    """Parameters of the served model.

    engine_dir, draft_engine_dir: absolute, or beginning with ``./`` relative to the version folder of the model.
    device: ``cpu``, ``cuda`` or ``cuda:N``; empty for the GPU where there is one. max_draft_len: None for what the engine
    was built for. prefix_cache_gib: memory for what prompts begin with in common. cuda_graphs: run decode steps as graphs
    where the engine can. scaled_matmul: multiply kept FP8 weights as they are (network/scaled). time_slice: tokens after
    which a request makes room for one that waits; None for never. exclude_input_in_output: whether output_ids leaves out the
    prompt, where a request does not say. cancellation_check_period_ms: how often it is looked whether clients have left.
    """

    engine_dir: str
    device: str = ""
    plugin_impl: PluginImpl = "auto"
    speculative_decoding_mode: str = ""
    max_draft_len: int | None = None
    draft_engine_dir: str = ""
    prefix_cache_gib: float = 0.0
    cuda_graphs: bool = True
    scaled_matmul: bool = False
    time_slice: int | None = None
    exclude_input_in_output: bool = True
    cancellation_check_period_ms: int = 100
    log_level: str = "warning"

    def with_folders(self, folders: Mapping[str, str]) -> ServingOptions:
        """The same with other places of the engines."""
        values: dict[str, Any] = dict(folders)
        return replace(self, **values)

    def parameters(self) -> dict[str, str]:
        """As strings, those that are not set left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: text(value) for name, value in values.items() if value not in (None, "")}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> ServingOptions:
        """Raises UserError for parameters that are missing, unknown, or cannot be read."""
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(set(parameters) - set(known)):
            raise UserError(f"config.pbtxt has the unknown parameter {unknown[0]}", f"known are {', '.join(known)}")
        if not parameters.get("engine_dir"):
            raise UserError(
                "config.pbtxt does not say engine_dir", "write the repository with: trtllm-replayssm triton-repo"
            )
        values: dict[str, Any] = {}
        for name, value in parameters.items():
            read = READ.get(str(known[name].type), str)
            try:
                values[name] = read(value)
            except ValueError:
                raise UserError(f"parameter {name} of config.pbtxt is {value!r}") from None
        return cls(**values)

    def engine_folder(self, version_folder: Path) -> Path:
        return located(self.engine_dir, version_folder)

    def load(self, version_folder: Path) -> LLM:
        """The engine, or this process's rank of it. Raises UserError or EngineError."""
        from trtllm_replayssm.runtime.llm import LLM
        from trtllm_replayssm.runtime.speculation.options import SpeculationOptions

        speculation = None
        if self.speculative_decoding_mode:
            draft = located(self.draft_engine_dir, version_folder) if self.draft_engine_dir else None
            speculation = SpeculationOptions(self.speculative_decoding_mode, self.max_draft_len, draft)  # type: ignore[arg-type]
        return LLM(
            self.engine_folder(version_folder),
            self.device or None,
            self.plugin_impl,
            speculation,
            prefix_cache_bytes=round(self.prefix_cache_gib * 2**30),
            time_slice=self.time_slice,
            cuda_graphs=None if self.cuda_graphs else False,
            scaled_matmul=self.scaled_matmul,
        )

    def check(self, version_folder: Path) -> EngineConfig:
        """The engine's config.

        Raises EngineError when it, or the draft model's, is none of ours, or has no FP8 weights to multiply, and UserError for
        drafts that it has no room for.
        """
        if self.draft_engine_dir:
            EngineConfig.read(located(self.draft_engine_dir, version_folder))
        config = EngineConfig.read(self.engine_folder(version_folder))
        if self.speculative_decoding_mode:
            draft_room(config.replay, self.max_draft_len)
        if self.scaled_matmul:
            from trtllm_replayssm.runtime.engine import check_scaled_matmul

            check_scaled_matmul(self.engine_folder(version_folder), config)
        return config


def located(folder: str, version_folder: Path) -> Path:
    return version_folder / folder if folder.startswith(INSIDE) else Path(folder)


def text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_bool(value: str) -> bool:
    """Raises ValueError for anything but true and false."""
    return bool(("false", "true").index(value.lower()))


#: How a parameter is read, by the annotation of its field.
READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "int | None": int, "bool": read_bool}
