"""Every description of a folder, from config.json and from ModelOpt's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.hf.config import TEXT_SECTIONS, HfConfig, read_config
from trtllm_replayssm.builders.hf.description import BF16_HINT, Description, refused
from trtllm_replayssm.builders.hf.descriptions.compressed_tensors import compressed_tensors
from trtllm_replayssm.builders.hf.descriptions.modelopt import modelopt
from trtllm_replayssm.builders.hf.descriptions.native_fp8 import native_fp8
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

#: Where ModelOpt writes its description, beside or instead of config.json.
MODELOPT_FILE = "hf_quant_config.json"
#: Keys of config.json under which descriptions stand.
DESCRIPTION_KEYS = ("quantization_config", "compression_config")
READERS: dict[str, Callable[[HfConfig], Description]] = {
    "modelopt": modelopt,
    "fp8": native_fp8,
    "compressed-tensors": compressed_tensors,
}


def read_descriptions(path: Path, config: dict[str, Any]) -> list[Description]:
    """Every description of the folder, empty when it says nothing of quantisation.

    A wrapper may carry it at its own level or at that of its text model. Raises UnsupportedModelError, with the format's
    name, for formats that are not read; CheckpointError for descriptions that do not add up.
    """
    levels = {"config.json": config}
    levels |= {f"config.json: {key}": config[key] for key in TEXT_SECTIONS if isinstance(config.get(key), dict)}
    found = []
    if (path / MODELOPT_FILE).exists():
        found.append(read_modelopt_file(path / MODELOPT_FILE))
    for where, level in levels.items():
        if level.get("quantization"):
            raise mlx(f"{where}: quantization", level["quantization"])
        found += [describe(level[key], f"{where}: {key}") for key in DESCRIPTION_KEYS if level.get(key)]
    empty = [description for description in found if description.needs_table]
    if empty and not any(description.table.values or description.table.globs for description in found):
        raise CheckpointError(
            f"{empty[0].where}: quantized_layers is missing, and {empty[0].name} says nothing without it",
            f"download {MODELOPT_FILE} too, if the checkpoint has one",
        )
    return found


def read_modelopt_file(file: Path) -> Description:
    whole = HfConfig(read_config(file), MODELOPT_FILE, frozenset())
    values = whole.get("quantization")
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} has no object quantization", "download the file again")
    whole.ignore("producer")
    whole.finish()
    return describe({"quant_method": "modelopt", **values}, MODELOPT_FILE)


def describe(values: Any, where: str) -> Description:
    """The description in an object of config.json or of ModelOpt's file."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is {values!r}; expected an object")
    config = HfConfig(values, where, frozenset())
    if "quant_method" not in config and "bits" in config:
        raise mlx(where, values)
    method = config.get("quant_method", "modelopt" if "quant_algo" in config else None)
    family = "modelopt" if isinstance(method, str) and method.startswith("modelopt") else method
    reader = READERS.get(family) if isinstance(family, str) else None
    if reader is None:
        raise refused(where, f"quant_method {method!r}", READERS)
    description = reader(config)
    config.finish()
    return description


def mlx(where: str, values: Any) -> UnsupportedModelError:
    bits = f" of {values['bits']} bits" if isinstance(values, dict) and "bits" in values else ""
    return UnsupportedModelError(f"{where}: quantisation by MLX{bits} is not read", BF16_HINT)
