"""What is decided when an engine is built, and config.json of an engine folder, which records it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

import trtllm_replayssm
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.typed import damage
from trtllm_replayssm.counts import check_count
from trtllm_replayssm.errors import CheckpointError, EngineError, UserError
from trtllm_replayssm.network.tensorrt.options import PlanOptions
from trtllm_replayssm.plugins import PLUGIN_VERSION
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.tensorrt.record import PlanRecord

#: What runs an engine: this package with torch, or TensorRT. ``auto`` is TensorRT where it can build.
FLAVOURS = ("embedded", "tensorrt")
#: Version of the engine folder's layout.
ENGINE_FORMAT = 1
#: Longest sequence of an engine that was built without ``max_seq_len``: the trained maximum of hybrid models (often
#: 262,144) would ask for a KV cache that few requests use.
DEFAULT_MAX_SEQ_LEN = 4096
ENGINE_FOLDER = "an engine is a folder written by: trtllm-replayssm build"
REBUILD = "build the engine again with: trtllm-replayssm build"


@dataclass(frozen=True)
class BuildOptions:
    """Options of ``build_engine``; the names are those of ``trtllm-build`` where it has them.

    max_batch_size: requests that run at the same time, one slot of state each.
    max_seq_len: most tokens of a request, prompt and output; None for the smaller of what the model was trained for and
        DEFAULT_MAX_SEQ_LEN.
    max_num_tokens: most tokens of all requests in one prefill step.
    engine_flavour: one of FLAVOURS, or auto.
    replay_window, max_draft_len, state_dtype, state_read_dtype, ring_dtype, replay_fold, state_rounding,
        force_quantised_state: instead of the checkpoint's (replay.ReplayConfig).
    Of the flavour tensorrt only: opt_num_tokens, the tokens of a prefill step that its kernels are chosen for; None for
        EngineConfig.prefill_chunk. gather_context_logits: a prefill can give every token's logits. aliased_state: tell
        TensorRT which pools are one memory, in and out. debug_plugins: have it call Python for every plugin layer.
        scaled_matmul: round the inputs of weights that stayed quantised, where the checkpoint has their scales, so that FP8
        and FP4 numbers are multiplied. plan: what is asked of its builder.
    """

    max_batch_size: int = 8
    max_seq_len: int | None = None
    max_num_tokens: int = 8192
    engine_flavour: str = "embedded"
    replay_window: int | None = None
    max_draft_len: int | None = None
    state_dtype: str | None = None
    state_read_dtype: str | None = None
    ring_dtype: str | None = None
    replay_fold: str | None = None
    state_rounding: str | None = None
    force_quantised_state: bool | None = None
    opt_num_tokens: int | None = None
    gather_context_logits: bool = False
    aliased_state: bool = False
    debug_plugins: bool = False
    scaled_matmul: bool = False
    plan: PlanOptions = field(default_factory=PlanOptions)

    def __post_init__(self) -> None:
        if self.engine_flavour != "auto":
            check_flavour(self.engine_flavour)
        for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "opt_num_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)

    def for_tensorrt(self) -> list[str]:
        """Names of the options that were given and mean something for TensorRT only."""
        own = [name for name in ("aliased_state", "debug_plugins", "scaled_matmul") if getattr(self, name)]
        plain = PlanOptions()
        return own + [f.name for f in fields(plain) if getattr(self.plan, f.name) != getattr(plain, f.name)]

    def replay(self, checkpoint: ReplayConfig) -> ReplayConfig:
        """The checkpoint's options with those that were given here. Raises UserError when they do not fit together."""
        given: dict[str, Any] = {
            "window": self.replay_window,
            "max_draft_len": self.max_draft_len,
            "state_dtype": self.state_dtype,
            "state_read_dtype": self.state_read_dtype,
            "ring_dtype": self.ring_dtype,
            "fold": self.replay_fold,
            "state_rounding": self.state_rounding,
            "force_quantised_state": self.force_quantised_state,
        }
        return replace(checkpoint, **{name: value for name, value in given.items() if value is not None})


def check_flavour(flavour: str) -> None:
    """Raises EngineError for engines that this version neither builds nor loads."""
    if flavour not in FLAVOURS:
        raise EngineError(f"engine flavour {flavour!r} is not known", f"use --engine_flavour {' or '.join(FLAVOURS)}")


@dataclass(frozen=True)
class EngineConfig:
    """config.json of an engine folder.

    checkpoint: the model, with the ReplaySSM options that the build settled on. fingerprint: names this build in every
    rank file. rank_bytes: sizes of the rank files, none before they are written. package_version, torch_version: of the
    program that built it. tensorrt: of the flavour tensorrt, its plans; None before they are built.

    Raises UserError for limits that no build has: with them, steps would take no tokens and never end.
    """

    checkpoint: CheckpointConfig
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    engine_flavour: str = "embedded"
    fingerprint: str = ""
    rank_bytes: tuple[int, ...] = ()
    package_version: str = trtllm_replayssm.__version__
    torch_version: str = torch.__version__
    tensorrt: PlanRecord | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "max_num_tokens"):
            check_count(name, getattr(self, name))
        step = self.max_batch_size * self.replay.verify_tokens
        if self.max_num_tokens < step:
            raise EngineError(
                f"max_num_tokens {self.max_num_tokens} is too small for a step of {self.max_batch_size} requests, "
                f"which takes {step} tokens",
                "raise --max_num_tokens, or lower --max_batch_size or --max_draft_len",
            )
        if not all(type(size) is int and size > 0 for size in self.rank_bytes):
            raise EngineError(f"rank_bytes are {list(self.rank_bytes)}; sizes are integers of 1 or more")

    @property
    def built(self) -> bool:
        """Whether it lies in a folder, with the sizes that its build was given; a synthetic engine does not."""
        return bool(self.rank_bytes)

    @property
    def world_size(self) -> int:
        return self.checkpoint.tp_size

    @property
    def replay(self) -> ReplayConfig:
        return self.checkpoint.replay

    @property
    def prefill_chunk(self) -> int:
        """Tokens of one request in a prefill step.

        It follows from the build alone: where a prompt is cut, its state is rounded to the state's dtype, so cutting it
        differently next to other requests would change its output.
        """
        return self.max_num_tokens // self.max_batch_size

    def decoder(self) -> HybridDecoder:
        """The decoder of one rank."""
        return self.checkpoint.rank_decoder()

    def pools(self) -> dict[str, Pool]:
        """State tensors of one rank by name, the cursors among them."""
        options = StateOptions(self.replay, self.checkpoint.torch_dtype, self.max_seq_len)
        decoder, cursors = self.decoder(), {"cursors": Pool((CURSOR_WORDS,), torch.int32, "cursor")}
        return decoder.pools(options) | decoder.mtp_pools(options) | cursors

    def slot_bytes(self) -> int:
        """Bytes of state of one request on one rank."""
        return sum(pool.slot_bytes for pool in self.pools().values())

    def build_config(self) -> dict[str, Any]:
        return {
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "max_num_tokens": self.max_num_tokens,
            "max_beam_width": 1,
            "max_draft_len": self.replay.max_draft_len,
        }

    def to_dict(self) -> dict[str, Any]:
        plans = {} if self.tensorrt is None else {"tensorrt": self.tensorrt.to_dict()}
        return {
            "version": self.package_version,
            "pretrained_config": self.checkpoint.to_dict(),
            "build_config": self.build_config(),
            "replayssm": {
                "format_version": ENGINE_FORMAT,
                "plugin_version": PLUGIN_VERSION,
                "package_version": self.package_version,
                "torch_version": self.torch_version,
                "engine_flavour": self.engine_flavour,
                "fingerprint": self.fingerprint,
                "rank_bytes": list(self.rank_bytes),
                **plans,
            },
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> EngineConfig:
        """The config that ``to_dict`` wrote. Raises EngineError for other programs' engines and other versions'."""
        ours = data.get("replayssm")
        if not isinstance(ours, dict) or not isinstance(data.get("pretrained_config"), dict):
            raise EngineError(f"{where} does not describe an engine of trtllm-replayssm", ENGINE_FOLDER)
        check_flavour(ours.get("engine_flavour", "missing"))
        for name, wanted in (("format_version", ENGINE_FORMAT), ("plugin_version", PLUGIN_VERSION)):
            if ours.get(name) != wanted:
                built_by = ours.get("package_version")
                raise EngineError(
                    f"{where} has {name} {ours.get(name)} (built by version {built_by}); this version needs {wanted}",
                    REBUILD,
                )
        try:
            checkpoint = CheckpointConfig.from_dict(data["pretrained_config"], where)
        except CheckpointError as error:
            # Its sentence names the file and the damage; only what to do is another thing.
            raise EngineError(error.message, REBUILD) from None
        try:
            build = data["build_config"]
            config = cls(
                checkpoint=checkpoint,
                max_batch_size=build["max_batch_size"],
                max_seq_len=build["max_seq_len"],
                max_num_tokens=build["max_num_tokens"],
                engine_flavour=ours["engine_flavour"],
                fingerprint=ours["fingerprint"],
                rank_bytes=tuple(ours["rank_bytes"]),
                package_version=ours["package_version"],
                torch_version=ours["torch_version"],
                tensorrt=PlanRecord.from_dict(ours["tensorrt"]) if ours["engine_flavour"] == "tensorrt" else None,
            )
            if len(config.rank_bytes) != config.world_size:
                raise EngineError(f"it has {len(config.rank_bytes)} rank_bytes for {config.world_size} rank(s)")
            if not isinstance(config.fingerprint, str):
                raise EngineError(f"its fingerprint is {config.fingerprint!r}")
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise EngineError(f"{where} is damaged: {damage(error)}", REBUILD) from None
        return config

    @classmethod
    def read(cls, folder: Path) -> EngineConfig:
        """Raises EngineError when ``folder`` is not an engine folder that this version can load."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise EngineError(f"{path} does not exist", ENGINE_FOLDER) from None
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{path} cannot be read as JSON: {error}", REBUILD) from None
        if not isinstance(data, dict):
            raise EngineError(f"{path} does not hold a JSON object", REBUILD)
        return cls.from_dict(data, str(path))


def engine_file(rank: int) -> str:
    return f"rank{rank}.engine"
