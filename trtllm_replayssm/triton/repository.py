"""A model repository for Triton: written whole, with nothing left to fill in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from trtllm_replayssm.builders.staging import check_folders, check_space, staged_folder
from trtllm_replayssm.triton.options import INSIDE, ServingOptions
from trtllm_replayssm.triton.tensors import INPUTS, OUTPUTS, TensorSpec

#: Names of the two models, as in the repositories of TensorRT-LLM's backend.
TOKEN_MODEL, TEXT_MODEL = "tensorrt_llm", "ensemble"
#: What Triton's python backend loads.
MODEL_FILE = '''"""The engine behind this model: see engine_dir in config.pbtxt, and docs/serving.md of trtllm-replayssm."""

from trtllm_replayssm.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
#: Folders of engines inside the version folder, where they were copied there.
ENGINE_COPY, DRAFT_COPY = "engine", "draft_engine"


def write_repository(options: ServingOptions, output_dir: str | Path, copy_engine: bool = False) -> None:
    """Write a repository of two models: one that owns the engine, and one that speaks text by way of it.

    output_dir: appears complete or not at all; an earlier repository of ours is replaced, anything else refused.
    copy_engine: put the engine folders into the repository, which can then be moved; otherwise it names their places.
    Raises EngineError or UserError for engines and folders that cannot be used.
    """
    output, version = Path(output_dir), Path(TOKEN_MODEL) / "1"
    folders = {name: Path(folder).resolve() for name, folder in engine_folders(options).items()}
    options = options.with_folders({name: str(folder) for name, folder in folders.items()})
    options.check(output)
    for folder in folders.values():
        check_folders(folder, output, is_repository)
    if copy_engine:
        copies = {"engine_dir": ENGINE_COPY, "draft_engine_dir": DRAFT_COPY}
        options = options.with_folders({name: INSIDE + copies[name] for name in folders})
        check_space(output, sum(path.stat().st_size for folder in folders.values() for path in files(folder)))
    with staged_folder(output) as staging:
        (staging / version).mkdir(parents=True)
        (staging / TEXT_MODEL / "1").mkdir(parents=True)
        # Stores of objects keep no empty folders, and Triton wants one for the version.
        (staging / TEXT_MODEL / "1" / ".keep").touch()
        (staging / version / "model.py").write_text(MODEL_FILE, encoding="utf-8")
        (staging / TOKEN_MODEL / "config.pbtxt").write_text(token_config(options), encoding="utf-8")
        (staging / TEXT_MODEL / "config.pbtxt").write_text(text_config(), encoding="utf-8")
        if copy_engine:
            for name, folder in folders.items():
                target = staging / version / getattr(options, name)
                target.mkdir()
                for path in files(folder):
                    shutil.copy2(path, target)


def files(folder: Path) -> list[Path]:
    """What an engine folder holds."""
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


def engine_folders(options: ServingOptions) -> dict[str, str]:
    given = {"engine_dir": options.engine_dir, "draft_engine_dir": options.draft_engine_dir}
    return {name: folder for name, folder in given.items() if folder}


def is_repository(folder: Path) -> bool:
    """Whether the folder is a repository that this program has written, and holds nothing else."""
    try:
        ours = (folder / TOKEN_MODEL / "1" / "model.py").read_text(encoding="utf-8") == MODEL_FILE
    except (OSError, ValueError):
        return False
    return ours and {path.name for path in folder.iterdir()} == {TOKEN_MODEL, TEXT_MODEL}


# ---- config.pbtxt ----------------------------------------------------------------------------------------------------


def token_config(options: ServingOptions) -> str:
    """config.pbtxt of the model that owns the engine.

    One instance, because the slots of an engine have one owner; requests are batched in it, step by step, so that Triton is
    to hand them over one by one and at once: max_batch_size 1, no dynamic batching.
    """
    return "\n".join(
        [
            f'name: "{TOKEN_MODEL}"',
            'backend: "python"',
            "max_batch_size: 1",
            "model_transaction_policy { decoupled: true }",
            *(tensor("input", spec.name, spec, " optional: true") for spec in INPUTS),
            *(tensor("output", spec.name, spec) for spec in OUTPUTS),
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            *(parameter(name, value) for name, value in options.parameters().items()),
            "",
        ]
    )


def text_config() -> str:
    """config.pbtxt of the model with the names of TensorRT-LLM's text models; all it does is to rename."""
    inputs, outputs = named(INPUTS), named(OUTPUTS)
    return "\n".join(
        [
            f'name: "{TEXT_MODEL}"',
            'platform: "ensemble"',
            "max_batch_size: 1",
            "model_transaction_policy { decoupled: true }",
            *(tensor("input", s.text_name, s, "" if s.name == "text_input" else " optional: true") for s in inputs),
            *(tensor("output", spec.text_name, spec) for spec in outputs),
            "ensemble_scheduling {",
            f'  step [ {{ model_name: "{TOKEN_MODEL}" model_version: -1',
            *(f'    input_map {{ key: "{spec.name}" value: "{spec.text_name}" }}' for spec in inputs),
            *(f'    output_map {{ key: "{spec.name}" value: "{spec.text_name}" }}' for spec in outputs),
            "  } ]",
            "}",
            "",
        ]
    )


def named(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return [spec for spec in specs if not spec.tokens_only]


def tensor(side: str, name: str, spec: TensorSpec, more: str = "") -> str:
    dims = ", ".join(map(str, spec.dims))
    return f'{side} [ {{ name: "{name}" data_type: TYPE_{spec.dtype} dims: [ {dims} ]{more} }} ]'


def parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {json.dumps(name)} value: {{ string_value: {json.dumps(value)} }} }}"
