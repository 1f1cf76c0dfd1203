"""Tables of n-grams, as quantised files of Qwen3.8-Flash-Next have them: E4M3 in shards, with one scale for all.

What a description says of all modules, or excludes by a pattern, is about linear layers. Published files put ``*.ple.*`` among
the exclusions of a table in FP8 (ModelOpt), or describe blocks that it does not have (``quant_method: fp8``).
"""

from __future__ import annotations

import re
from typing import Any

from trtllm_replayssm.builders.hf.config import text_section
from trtllm_replayssm.builders.hf.description import Description, label
from trtllm_replayssm.builders.hf.formats.base import Format
from trtllm_replayssm.builders.hf.formats.fp8 import Fp8
from trtllm_replayssm.builders.hf.module_names import ModulePatterns
from trtllm_replayssm.builders.hf.module_table import ModuleTable
from trtllm_replayssm.builders.safetensors_reader import TensorEntry
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

NAME = "ngram_embedding"
SHARD = re.compile(rf"(?P<table>.+\.{NAME})\.shard_\d+")
FORMAT = Fp8()
#: The key of config.json for the dtype in which engines keep the table, and its word for E4M3.
DTYPE_KEY, DTYPE = "ple_embedding_dtype", "float8_e4m3fn"


def is_ngram_table(module: str) -> bool:
    """Whether a module, or a pattern, is a table of n-grams or one of its shards."""
    return NAME in module


def share_scales(parts: dict[str, dict[str, str]]) -> None:
    """Gives every shard the scale of its table. parts: tensors of quantised modules by module and part, changed in place."""
    shards = [(module, match["table"]) for module in parts if (match := SHARD.fullmatch(module))]
    scales = {table: parts[table]["weight_scale"] for _, table in shards if "weight_scale" in parts.get(table, {})}
    for module, table in shards:
        if table in scales:
            parts[module].setdefault("weight_scale", scales[table])
    for table in scales:
        del parts[table]["weight_scale"]
        if not parts[table]:
            del parts[table]


def table_format(
    descriptions: list[Description], module: str, parts: dict[str, str], entries: dict[str, TensorEntry]
) -> Format:
    """The format of a table, or of a shard, that is quantised according to its tensors ``parts``.

    Raises UnsupportedModelError for other formats than E4M3; CheckpointError where a table of modules names another one.
    """
    values = parts.get("weight") or parts.get("weight_packed")
    if values is not None and entries[values].dtype != "F8_E4M3":
        raise UnsupportedModelError(
            f"{values} is of a table of n-grams in {entries[values].dtype}, and only BF16 and FP8 with one scale are read",
            "use the checkpoint whose table is in BF16 or FP8",
        )
    for description in descriptions:
        for format in description.table.find(module):
            if format != FORMAT:
                raise CheckpointError(
                    f"{description.where} says that {module} is {label(format)}, but its tensors are those of {FORMAT.label}",
                    "the description and the tensors belong to different checkpoints",
                )
    return FORMAT


def described_by_dtype(config: dict[str, Any]) -> list[Description]:
    """The description of a checkpoint that has nothing else quantised, by the key of its config; none without the key."""
    if text_section(config).get(DTYPE_KEY) != DTYPE:
        return []
    where = f"config.json: {DTYPE_KEY}"
    return [Description(where, f"{DTYPE_KEY} {DTYPE}", ModuleTable({}, where), ModulePatterns([], where))]
