"""FP8 as Qwen, Ling and DeepSeek publish it."""

from __future__ import annotations

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.description import Description, block, names
from trtllm_replayssm.builders.hf.formats.fp8 import BlockFp8, Fp8
from trtllm_replayssm.builders.hf.module_names import ModulePatterns
from trtllm_replayssm.builders.hf.module_table import ModuleTable
from trtllm_replayssm.builders.hf.ngram_tables import is_ngram_table


def native_fp8(config: HfConfig) -> Description:
    """modules_to_convert: modules that are quantised though they are no linear layers; tables of n-grams are the known ones."""
    config.expect("fmt", "e4m3")
    config.expect("activation_scheme", "dynamic", "static")
    config.expect("scale_fmt", "float", "ue8m0")
    whole = "weight_block_size" not in config
    config.ignore("weight_block_size")
    format = Fp8() if whole else BlockFp8("weight_scale_inv", block(config, "weight_block_size"))
    converted = names(config, "modules_to_convert")
    unknown = [name for name in converted if not is_ngram_table(name)]
    if unknown:
        raise config.fail("modules_to_convert", f"names {unknown[0]}, whose format is not known")
    return Description(
        where=config.where,
        name="FP8",
        table=ModuleTable(dict.fromkeys(converted, Fp8()), config.where),
        ignored=ModulePatterns(
            [*names(config, "modules_to_not_convert"), *names(config, "ignored_layers")], config.where
        ),
        groups=((None, format),),
    )
