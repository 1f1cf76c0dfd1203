"""What a checkpoint says of its quantisation: the format of every module, from config.json and hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.hf.config import TEXT_SECTIONS, HfConfig, read_config
from trtllm_replayssm.builders.hf.formats.base import Format
from trtllm_replayssm.builders.hf.formats.fp8 import BlockFp8, ChannelFp8, Fp8
from trtllm_replayssm.builders.hf.formats.int4 import Int4
from trtllm_replayssm.builders.hf.formats.mxfp4 import Mxfp4
from trtllm_replayssm.builders.hf.formats.nvfp4 import CompressedNvfp4, ModelOptNvfp4, SvdNvfp4
from trtllm_replayssm.builders.hf.module_names import ModulePatterns, ModuleTable
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

#: Where ModelOpt writes its description, beside or instead of config.json.
MODELOPT_FILE = "hf_quant_config.json"
#: Keys of config.json under which descriptions stand.
DESCRIPTION_KEYS = ("quantization_config", "compression_config")
#: Formats of ModelOpt by ``quant_algo``. The others differ in layout, or in what they do to the weights.
MODELOPT: dict[str, Format] = {
    "NVFP4": ModelOptNvfp4(),
    "W4A16_NVFP4": ModelOptNvfp4(),
    "NVFP4_AWQ": ModelOptNvfp4(smoothed=True),
    "NVFP4_SVD": SvdNvfp4(),
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": ChannelFp8(),
}
MIXED = "MIXED_PRECISION"
BF16_HINT = "use the BF16 checkpoint"


@dataclass(frozen=True)
class Description:
    """One of a checkpoint's descriptions. where: file and key. name: for messages.

    table: formats of single modules, None for full precision; it wins over all else. ignored: modules in full precision.
    groups: formats of the modules that patterns name, the first that matches; None matches every module.
    """

    where: str
    name: str
    table: ModuleTable[Format | None]
    ignored: ModulePatterns
    groups: tuple[tuple[ModulePatterns | None, Format], ...]

    @property
    def claims(self) -> bool:
        """Whether any weight is quantised; a description may be of the KV cache alone."""
        return bool(self.groups or self.table.values or self.table.globs)

    def format(self, module: str) -> Format | None:
        """How the module's weight is stored; None in full precision."""
        listed = self.table.find(module)
        if listed:
            return listed[0]
        if self.ignored.match(module):
            return None
        return next((format for targets, format in self.groups if targets is None or targets.match(module)), None)


def read_descriptions(path: Path, config: dict[str, Any]) -> list[Description]:
    """Every description of the folder, empty when it says nothing of quantisation.

    A wrapper may carry it at its own level or at that of its text model. Raises UnsupportedModelError, with the format's
    name, for formats that are not read; CheckpointError for descriptions that do not add up.
    """
    levels = {"config.json": config}
    levels |= {f"config.json: {key}": config[key] for key in TEXT_SECTIONS if isinstance(config.get(key), dict)}
    found = []
    if (path / MODELOPT_FILE).exists():
        values = read_config(path / MODELOPT_FILE).get("quantization")
        if not isinstance(values, dict):
            raise CheckpointError(f"{path / MODELOPT_FILE} has no object quantization", "download the file again")
        found.append(describe({"quant_method": "modelopt", **values}, MODELOPT_FILE))
    for where, level in levels.items():
        if level.get("quantization"):
            raise mlx(f"{where}: quantization", level["quantization"])
        found += [describe(level[key], f"{where}: {key}") for key in DESCRIPTION_KEYS if level.get(key)]
    return found


def agreed_format(descriptions: list[Description], module: str) -> Format | None:
    """The module's format. Tables of modules win over general statements.

    Raises CheckpointError, naming the module, when descriptions of the same rank differ.
    """
    listing = [description for description in descriptions if description.table.find(module)] or descriptions
    formats = [description.format(module) for description in listing]
    for description, format in zip(listing, formats):
        if format != formats[0]:
            raise CheckpointError(
                f"{listing[0].where} and {description.where} disagree about {module}: {label(formats[0])}, {label(format)}",
                "remove the one that does not belong to the checkpoint",
            )
    return formats[0] if formats else None


def label(format: Format | None) -> str:
    return format.label if format else "not quantised"


def mlx(where: str, values: Any) -> UnsupportedModelError:
    bits = f" of {values['bits']} bits" if isinstance(values, dict) and "bits" in values else ""
    return UnsupportedModelError(f"{where}: quantisation by MLX{bits} is not read", BF16_HINT)


# ---- one reader per writer -------------------------------------------------------------------------------------------


def describe(values: Any, where: str) -> Description:
    """The description in an object of config.json or of ModelOpt's file."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} is {values!r}; expected an object")
    config = HfConfig(values, where)
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


def refused(where: str, what: str, known: Any) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where}: {what} is not read", f"{BF16_HINT}; read are {', '.join(known)}")


def modelopt(config: HfConfig) -> Description:
    """ModelOpt: one format for all but the excluded modules, or a table of modules, or both."""
    # Groups restate quant_algo and the table; scales of the KV cache and of activations are not needed.
    config.ignore("config_groups", "kv_cache_scheme", "kv_cache_quant_algo", "producer", "pre_quant_scale")
    # The tensors tell it.
    config.ignore("lora_rank")
    config.expect("has_zero_point", False)
    listed = config.get("quantized_layers", {})
    if not isinstance(listed, dict):
        raise config.fail("quantized_layers", "is not an object")
    table = {module: table_entry(config, module, entry) for module, entry in listed.items()}
    algorithm = config.text("quant_algo", "NONE")
    if algorithm == "NONE" and (listed or "config_groups" in config):
        raise config.fail("quant_algo", "is missing, and no value can be assumed for it")
    if algorithm == MIXED and not listed:
        raise config.fail("quantized_layers", f"is missing, and {MIXED} says nothing without it")
    check_group(config)
    return Description(
        where=config.where,
        name=f"ModelOpt {algorithm}",
        table=ModuleTable(table, f"{config.where}: quantized_layers"),
        ignored=ModulePatterns([*names(config, "exclude_modules"), *names(config, "ignore")], config.where),
        groups=() if algorithm in ("NONE", MIXED) else ((None, modelopt_format(config.where, algorithm)),),
    )


def table_entry(config: HfConfig, module: str, entry: Any) -> Format | None:
    if not isinstance(entry, dict):
        raise config.fail("quantized_layers", f"has no object for {module}")
    nested = HfConfig(entry, f"{config.where}: quantized_layers: {module}")
    nested.expect("has_zero_point", False)
    nested.ignore("pre_quant_scale", "awq_block_size", "lora_rank")
    algorithm = nested.text("quant_algo", "NONE")
    check_group(nested)
    nested.finish()
    return None if algorithm == "NONE" else modelopt_format(nested.where, algorithm)


def modelopt_format(where: str, algorithm: str) -> Format:
    # Formats that have no public name are written by their internal one, in lower case.
    if algorithm.upper() not in MODELOPT:
        raise refused(where, f"quant_algo {algorithm}", (*MODELOPT, MIXED))
    return MODELOPT[algorithm.upper()]


def check_group(config: HfConfig) -> None:
    """NVFP4 has 16 columns a scale and FP8 no groups; some writers put 0 or the channel count's default for the latter."""
    if "NVFP4" in config.text("quant_algo", ""):
        config.expect("group_size", 16)
    config.ignore("group_size")


def native_fp8(config: HfConfig) -> Description:
    """FP8 as Qwen, Ling and DeepSeek publish it."""
    config.expect("fmt", "e4m3")
    config.expect("activation_scheme", "dynamic", "static")
    config.expect("scale_fmt", "float", "ue8m0")
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise config.fail("weight_block_size", f"is {block!r}; expected rows and columns")
    format = Fp8() if block is None else BlockFp8("weight_scale_inv", (block[0], block[1]))
    ignored = [*names(config, "modules_to_not_convert"), *names(config, "ignored_layers")]
    return Description(
        where=config.where,
        name="FP8",
        table=ModuleTable({}, config.where),
        ignored=ModulePatterns(ignored, config.where),
        groups=((None, format),),
    )


def compressed_tensors(config: HfConfig) -> Description:
    """compressed-tensors: groups of modules, each with a format."""
    config.ignore("quantization_status", "global_compression_ratio", "version", "kv_cache_scheme", "producer")
    if config.get("transform_config"):
        raise refused(config.where, "a transform_config (rotated weights)", COMPRESSED)
    if config.get("sparsity_config"):
        config.section("sparsity_config").expect("format", "dense")
    general, groups = config.text("format", MIXED_FORMATS), config.section("config_groups")
    made = [group(groups.section(key), general) for key in groups.values]
    return Description(
        where=config.where,
        name=f"compressed-tensors {general}",
        table=ModuleTable({}, config.where),
        ignored=ModulePatterns(names(config, "ignore"), config.where),
        # What names modules goes before what names classes.
        groups=tuple(sorted(made, key=lambda group: group[0] is None)),
    )


def group(config: HfConfig, general: str) -> tuple[ModulePatterns | None, Format]:
    config.ignore("input_activations", "output_activations")
    targets, kind = names(config, "targets"), config.text("format", general)
    if not targets:
        raise config.fail("targets", "names no modules")
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
    # Names of classes, such as Linear, tell nothing that the tensors do not.
    classes = any(name.isidentifier() and name[0].isupper() for name in targets)
    return (None if classes else ModulePatterns(targets, config.where)), made


def compressed_nvfp4(weights: HfConfig) -> Format:
    expect_all(
        weights, {"num_bits": (4,), "type": ("float",), "group_size": (16,), "strategy": ("tensor_group", "group")}
    )
    return CompressedNvfp4()


def compressed_mxfp4(weights: HfConfig) -> Format:
    expect_all(weights, {"num_bits": (4,), "type": ("float",), "group_size": (32,), "strategy": ("group",)})
    return Mxfp4()


def compressed_int(weights: HfConfig) -> Format:
    expect_all(weights, {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel")})
    if weights.text("strategy", "group") == "channel":
        weights.ignore("group_size")
        return Int4(None)
    return Int4(weights.positive("group_size"))


def compressed_float(weights: HfConfig) -> Format:
    expect_all(weights, {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "channel", "block")})
    weights.ignore("group_size")
    strategy = weights.text("strategy")
    if strategy == "block":
        block = weights.get("block_structure")
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise weights.fail("block_structure", f"is {block!r}; expected rows and columns")
        return BlockFp8(block=(block[0], block[1]))
    weights.ignore("block_structure")
    return ChannelFp8() if strategy == "channel" else Fp8()


def expect_all(config: HfConfig, allowed: dict[str, tuple[Any, ...]]) -> None:
    for key, values in allowed.items():
        config.expect(key, *values)


def names(config: HfConfig, key: str) -> list[str]:
    """A list of names, empty where there is none."""
    value = config.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise config.fail(key, f"is {value!r}; expected a list of module names")
    return value


#: The format of a description whose groups have their own.
MIXED_FORMATS = "mixed-precision"
READERS: dict[str, Callable[[HfConfig], Description]] = {
    "modelopt": modelopt,
    "fp8": native_fp8,
    "compressed-tensors": compressed_tensors,
}
COMPRESSED: dict[str, Callable[[HfConfig], Format]] = {
    "nvfp4-pack-quantized": compressed_nvfp4,
    "mxfp4-pack-quantized": compressed_mxfp4,
    "pack-quantized": compressed_int,
    "float-quantized": compressed_float,
}
