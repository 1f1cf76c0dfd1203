"""From a path to the model that lies there: a Hugging Face folder or config, a checkpoint, or an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.families.registry import architectures, find_family
from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.builders.hf.folder import INDEX_FILE, SINGLE_FILE, HfFolder
from trtllm_replayssm.builders.hf.metadata import model_dtype
from trtllm_replayssm.console import LOGGER
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.inspection import Subject
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import checked_files
from trtllm_replayssm.runtime.engine import checked_file
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.tensorrt.engine import check_files as check_plans

#: Positions of the KV cache that a report assumes where neither engine nor user says.
DEFAULT_MAX_SEQ_LEN = 8192


def read_subject(path: Path) -> Subject:
    """The model at ``path``: a folder with a config.json, or a config.json itself under any name.

    Raises CheckpointError or EngineError when there is none, or its rank files are not whole, UnsupportedModelError for
    families that are not built.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "give a model folder, a checkpoint, an engine or a config.json")
    file = path / "config.json" if path.is_dir() else path
    values = read_config(file)
    if "pretrained_config" in values:
        engine = EngineConfig.from_dict(values, str(file))
        if path.is_dir():
            check_engine_files(path, engine)
        return replace(checkpoint_subject(engine.checkpoint, "engine"), max_seq_len=engine.max_seq_len)
    if "architecture" in values and "architectures" not in values:
        checkpoint = CheckpointConfig.from_dict(values, str(file))
        if path.is_dir():
            checked_files(path, checkpoint)
        return checkpoint_subject(checkpoint)
    return hugging_face_subject(path, values)


def check_engine_files(folder: Path, engine: EngineConfig) -> None:
    """Raises EngineError unless the files of all ranks are there and whole."""
    if engine.tensorrt is not None:
        check_plans(folder, engine.tensorrt)
        return
    for rank in range(engine.world_size):
        checked_file(folder, engine, rank)


def checkpoint_subject(config: CheckpointConfig, source: str = "checkpoint") -> Subject:
    """What a checkpoint's, or an engine's, config.json describes."""
    return Subject(
        source=source,
        architecture=config.hf_architecture,
        decoder=config.decoder,
        replay=config.replay,
        dtype=config.dtype,
        tp_size=config.tp_size,
        packings=config.packings,
        max_seq_len=DEFAULT_MAX_SEQ_LEN,
    )


def hugging_face_subject(path: Path, values: dict[str, Any]) -> Subject:
    """Tensor shapes decide where there are tensors; a bare config is taken at its word."""
    shapes: dict[str, tuple[int, ...]] = {}
    source, dtype = "Hugging Face config", config_dtype(values)
    if path.is_dir() and any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        with HfFolder(path, LOGGER.warning) as folder:
            shapes, source, dtype = folder.shapes, "Hugging Face checkpoint", model_dtype(folder, "auto")
    family = find_family(values, shapes)
    for note in family.notes:
        LOGGER.warning(note)
    return Subject(
        source=source,
        architecture=next(iter(architectures(values)), type(family).architectures[0]),
        decoder=family.decoder(),
        replay=ReplayConfig(),
        dtype=dtype,
        tp_size=1,
        max_seq_len=DEFAULT_MAX_SEQ_LEN,
    )


def config_dtype(values: dict[str, Any]) -> str:
    """dtype that a Hugging Face config or its text part names; bfloat16 where it does not."""
    for level in (values, values.get("text_config")):
        if isinstance(level, dict):
            for key in ("dtype", "torch_dtype"):
                if level.get(key) in ("float32", "bfloat16", "float16"):
                    return str(level[key])
    return "bfloat16"
