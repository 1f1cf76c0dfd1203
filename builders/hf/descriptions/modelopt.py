"""ModelOpt's descriptions: one format for all but the excluded modules, or a table of modules, or both."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.description import Description, names, refused
from trtllm_replayssm.builders.hf.formats.base import Format
from trtllm_replayssm.builders.hf.formats.fp8 import ChannelFp8, Fp8, ModelOptBlockFp8
from trtllm_replayssm.builders.hf.formats.nvfp4 import ModelOptNvfp4, SvdNvfp4
from trtllm_replayssm.builders.hf.formats.unread import Unread
from trtllm_replayssm.builders.hf.module_names import ModulePatterns
from trtllm_replayssm.builders.hf.module_table import ModuleTable

#: Formats by ``quant_algo``. The others differ in layout, or in what they do to the weights.
MODELOPT: dict[str, Format] = {
    "NVFP4": ModelOptNvfp4(),
    "W4A16_NVFP4": ModelOptNvfp4(weight_only=True),
    "NVFP4_AWQ": ModelOptNvfp4(smoothed=True),
    "NVFP4_SVD": SvdNvfp4(),
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": ChannelFp8(),
    "FP8_PB_WO": ModelOptBlockFp8(),
    # TensorRT-LLM's name for the same blocks.
    "FP8_BLOCK_SCALES": ModelOptBlockFp8(),
}
MIXED = "MIXED_PRECISION"
#: Keys about the KV cache, the scales of activations, and what the tensors tell.
ASIDE = (
    *("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quantized_layers", "kv_cache_schema_version"),
    *("producer", "pre_quant_scale", "lora_rank"),
)


def modelopt(config: HfConfig) -> Description:
    """Raises UnsupportedModelError for a general format that is not read; single modules in one wait until they are used."""
    config.ignore(*ASIDE)
    config.expect("has_zero_point", False)
    listed = config.get("quantized_layers", {})
    if not isinstance(listed, dict):
        raise config.fail("quantized_layers", "is not an object")
    table = {module: table_entry(config, module, entry) for module, entry in listed.items()}
    algorithm = config.text("quant_algo", "NONE")
    if algorithm == "NONE" and (listed or "config_groups" in config):
        raise config.fail("quant_algo", "is missing, and no value can be assumed for it")
    check_group_size(config)
    general = None if algorithm in ("NONE", MIXED) else format_of(config.where, algorithm)
    check_groups(config, {*table.values(), general} - {None})
    return Description(
        where=config.where,
        name=f"ModelOpt {algorithm}",
        table=ModuleTable(table, f"{config.where}: quantized_layers"),
        ignored=ModulePatterns([*names(config, "exclude_modules"), *names(config, "ignore")], config.where),
        groups=((None, general),) if general else (),
        needs_table=algorithm == MIXED and not listed,
    )


def table_entry(config: HfConfig, module: str, entry: Any) -> Format | None:
    if not isinstance(entry, dict):
        raise config.fail("quantized_layers", f"has no object for {module}")
    nested = HfConfig(entry, f"{config.where}: quantized_layers: {module}", config.harmless)
    nested.expect("has_zero_point", False)
    nested.ignore("pre_quant_scale", "awq_block_size", "lora_rank")
    algorithm = nested.text("quant_algo", "NONE")
    if algorithm == "NONE":
        nested.ignore("group_size")
        nested.finish()
        return None
    if algorithm.upper() not in MODELOPT:
        # The layout of a format that is not read may need keys that are not known.
        return Unread(algorithm, refused(nested.where, f"quant_algo {algorithm}", (*MODELOPT, MIXED)))
    check_group_size(nested)
    nested.finish()
    return format_of(nested.where, algorithm)


def format_of(where: str, algorithm: str) -> Format:
    # Formats that have no public name are written by their internal one, in lower case.
    if algorithm.upper() not in MODELOPT:
        raise refused(where, f"quant_algo {algorithm}", (*MODELOPT, MIXED))
    return MODELOPT[algorithm.upper()]


def check_group_size(config: HfConfig) -> None:
    """NVFP4 has 16 columns a scale; FP8 has no groups, for which some writers put 0 or 16, or blocks that the tensors tell."""
    if "NVFP4" in config.text("quant_algo", ""):
        config.expect("group_size", 16)
    config.ignore("group_size")


def check_groups(config: HfConfig, formats: set[Format | None]) -> None:
    """Groups restate algorithm and table; of what they say, the numbers' type and width must be those of some format.

    Raises CheckpointError for others. What they say of activations is not compared: published files contradict themselves.
    """
    groups = config.get("config_groups", {})
    if not isinstance(groups, dict):
        raise config.fail("config_groups", "is not an object")
    if any(isinstance(format, Unread) for format in formats):
        return
    widths = {format.bits for format in formats if format is not None}
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind, bits = weights.get("type", "float"), weights.get("num_bits")
        if kind != "float" or (widths and bits is not None and bits not in widths):
            raise config.fail(
                f"config_groups: {key}", f"has weights of {bits} bits of type {kind}, which quant_algo contradicts"
            )
