"""Descriptions of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.description import Description, block, names, refused
from trtllm_replayssm.builders.hf.formats.base import Format
from trtllm_replayssm.builders.hf.formats.fp8 import BlockFp8, ChannelFp8, Fp8
from trtllm_replayssm.builders.hf.formats.int4 import Int4
from trtllm_replayssm.builders.hf.formats.mxfp4 import Mxfp4
from trtllm_replayssm.builders.hf.formats.nvfp4 import CompressedNvfp4
from trtllm_replayssm.builders.hf.module_names import ModulePatterns
from trtllm_replayssm.builders.hf.module_table import ModuleTable
from trtllm_replayssm.builders.hf.targets import CLASSES, Targets, is_class

#: The format of a description whose groups have their own.
MIXED_FORMATS = "mixed-precision"


def compressed_tensors(config: HfConfig) -> Description:
    config.ignore("quantization_status", "global_compression_ratio", "version", "kv_cache_scheme", "producer")
    if config.get("transform_config"):
        raise refused(config.where, "a transform_config (rotated weights)", COMPRESSED)
    if config.get("sparsity_config"):
        config.section("sparsity_config").expect("format", "dense")
    general, groups = config.text("format", MIXED_FORMATS), config.section("config_groups")
    return Description(
        where=config.where,
        name=f"compressed-tensors {general}",
        table=ModuleTable({}, config.where),
        ignored=ModulePatterns(names(config, "ignore"), config.where),
        groups=tuple(group(groups.section(key), general) for key in groups.values),
    )


def group(config: HfConfig, general: str) -> tuple[Targets, Format]:
    config.ignore("input_activations", "output_activations")
    targets, kind = names(config, "targets"), config.text("format", general)
    if not targets:
        raise config.fail("targets", "names no modules")
    classes = frozenset(filter(is_class, targets))
    unknown = sorted(classes.difference(CLASSES))
    if unknown:
        raise refused(config.where, f"a group of modules of class {unknown[0]}", CLASSES)
    if kind not in COMPRESSED:
        raise refused(config.where, f"format {kind}", COMPRESSED)
    weights = config.section("weights")
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.expect("dynamic", False)
    weights.expect("symmetric", True)
    # Other orders come with an index of groups, g_idx.
    weights.expect("actorder", False, "weight", "static")
    made = COMPRESSED[kind](weights)
    weights.finish()
    config.finish()
    patterns = ModulePatterns((target for target in targets if target not in classes), config.where)
    return Targets(patterns, classes), made


def nvfp4(weights: HfConfig) -> Format:
    expect_numbers(weights, 4, "float")
    expect_all(weights, {"group_size": (16,), "strategy": ("tensor_group", "group")})
    return CompressedNvfp4()


def mxfp4(weights: HfConfig) -> Format:
    expect_numbers(weights, 4, "float")
    expect_all(weights, {"group_size": (32,), "strategy": ("group",)})
    return Mxfp4()


def packed_int(weights: HfConfig) -> Format:
    expect_numbers(weights, 4, "int")
    expect_all(weights, {"strategy": ("group", "channel")})
    if weights.text("strategy", "group") == "channel":
        weights.ignore("group_size")
        return Int4(None)
    return Int4(weights.positive("group_size"))


def float8(weights: HfConfig) -> Format:
    expect_numbers(weights, 8, "float")
    expect_all(weights, {"strategy": ("tensor", "channel", "block")})
    weights.ignore("group_size", "block_structure")
    strategy = weights.text("strategy")
    if strategy == "block":
        return BlockFp8(block=block(weights, "block_structure"))
    return ChannelFp8() if strategy == "channel" else Fp8()


def expect_numbers(weights: HfConfig, bits: int, kind: str) -> None:
    """Both are required: the library's defaults, 8 and int, are those of another format."""
    if weights.integer("num_bits") != bits or weights.text("type") != kind:
        expect_all(weights, {"num_bits": (bits,), "type": (kind,)})


def expect_all(config: HfConfig, allowed: dict[str, tuple[Any, ...]]) -> None:
    for key, values in allowed.items():
        config.expect(key, *values)


COMPRESSED: dict[str, Callable[[HfConfig], Format]] = {
    "nvfp4-pack-quantized": nvfp4,
    "mxfp4-pack-quantized": mxfp4,
    "pack-quantized": packed_int,
    "float-quantized": float8,
}
