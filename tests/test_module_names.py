"""Names of modules in descriptions of quantised checkpoints: wrappers, blocks, ends of names, globs, expressions, tables."""

from __future__ import annotations

import pytest

from trtllm_replayssm.builders.hf.module_names import ModulePatterns, canonical
from trtllm_replayssm.builders.hf.module_table import ModuleTable
from trtllm_replayssm.errors import CheckpointError


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        # Wrappers on either side.
        ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mixer", "backbone.layers.0.mixer.in_proj", True),
        ("model.lm_head", "lm_head", True),
        # Whole components only, and the layer that is meant.
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj", False),
        ("mtp", "mtp.layers.0.self_attn.q_proj", True),
        ("model.visual", "model.visual.blocks.0.attn.qkv", True),
        # Ends of names, as Ling abbreviates them.
        ("b_proj", "model.layers.3.attention.b_proj", True),
        ("b_proj", "model.layers.3.attention.kv_b_proj", False),
        ("5.attention.g_proj", "model.layers.5.attention.g_proj", True),
        ("5.attention.g_proj", "model.layers.15.attention.g_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        # Projections that servers fuse.
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_a", True),
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_qkv", False),
        ("qkv_proj", "model.layers.0.self_attn.k_proj", True),
        ("qkv_proj", "model.layers.0.self_attn.o_proj", False),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj", True),
        # Globs.
        ("*.conv1d", "backbone.layers.0.mixer.conv1d", True),
        ("backbone.layers.4*", "backbone.layers.4.mixer.in_proj", True),
        ("model.layers.4.*", "backbone.layers.4.mixer.in_proj", True),
        ("model.layers.4.*", "backbone.layers.14.mixer.in_proj", False),
        ("mtp*", "mtp.layers.0.eh_proj", True),
        ("*lm_head*", "language_model.lm_head", True),
        ("lm_head*", "model.layers.0.mlp.up_proj", False),
        # Expressions start at the beginning of a spelling of the name.
        ("re:.*self_attn.*_proj$", "model.language_model.layers.0.self_attn.q_proj", True),
        ("re:model\\.layers\\.\\d\\.mlp", "model.language_model.layers.0.mlp.up_proj", True),
        ("re:layers\\.0", "backbone.layers.0.mixer", True),
        ("re:up_proj", "model.layers.0.mlp.up_proj", False),
        ("re:.*experts.*", "model.layers.0.mlp.shared.up_proj", False),
        # What looks ahead or back sees the module's own name only.
        ("re:^(?!.*language_model).*", "model.language_model.layers.0.mlp.up_proj", False),
        ("re:^(?!.*language_model).*", "mtp.layers.0.mlp.up_proj", True),
        ("re:(?=layers).*", "model.layers.0.mlp.up_proj", False),
        ("re:.*(?<!shared_expert)\\.up_proj", "model.layers.0.mlp.up_proj", True),
        # Globs and expressions mean what they say, and not what is fused.
        ("model.layers.0.linear_attn.in_proj_qkv*", "model.layers.0.linear_attn.in_proj_qkv", True),
        ("model.layers.0.linear_attn.in_proj_qkv*", "model.layers.0.linear_attn.in_proj_z", False),
        ("*.mlp.gate*", "model.layers.0.mlp.up_proj", False),
        ("re:.*qkv.*", "model.layers.0.self_attn.k_proj", False),
        ("model.layers.0.linear_attn.in_proj_qkvz", "model.layers.0.linear_attn.in_proj_z", True),
        ("in_proj_qkvz", "model.layers.0.linear_attn.in_proj_qkv", True),
    ],
)
def test_patterns(pattern: str, module: str, matches: bool) -> None:
    assert ModulePatterns([pattern], "here").match(module) is matches
    assert ModulePatterns(["other", pattern, "re:none", "no*"], "here").match(module) is matches


def test_canonical_names() -> None:
    assert canonical("model.language_model.layers.0.x") == "layers.0.x"
    assert canonical("mtp.layers.0.x") == "mtp.layers.0.x"
    assert canonical("lm_head") == canonical("language_model.lm_head") == "lm_head"
    assert canonical("model") == "model"


def test_tables_know_modules_and_the_blocks_around_them() -> None:
    table = ModuleTable({"model.layers.0.mlp": 1, "model.layers.0.mlp.up_proj": 2, "model.layers.*.out": 3}, "here")
    assert table.find("backbone.layers.0.mlp.up_proj") == (2,)
    assert table.find("model.layers.0.mlp.experts.3.down_proj") == (1,)
    assert table.find("model.layers.7.out") == (3,)
    assert table.find("model.layers.1.mlp.up_proj") == ()
    assert table.named("model.layers.0.mlp.up_proj")
    assert not table.named("model.layers.0.mlp.down_proj")
    fused = ModuleTable({"model.layers.0.qkv_proj": 4, "model.layers.*.gate*": 5}, "here")
    assert fused.find("model.layers.0.k_proj") == (4,)
    assert fused.find("model.layers.0.up_proj") == ()


def test_the_entry_that_says_most_decides() -> None:
    """A module before all else, then the block or glob with most components, and of two with as many the block."""
    entries = {"model.layers.0": 1, "model.layers.*.mlp.experts.*": 2, "layers.0.mlp.experts.7": 3, "*.lm_head": 4}
    table = ModuleTable(entries | {"model.layers.0.mlp.experts.5.up_proj": 5, "*.experts.9.up_proj": 6}, "here")
    assert table.find("model.layers.0.mlp.experts.1.up_proj") == (2,)
    assert table.find("model.layers.0.mlp.experts.5.up_proj") == (5,)
    assert table.find("model.layers.0.mlp.experts.7.up_proj") == (3,)
    assert table.find("model.layers.0.mlp.up_proj") == (1,)
    assert table.find("model.layers.0.experts.9.up_proj") == (6,)
    equal = ModuleTable({"layers.*.mlp": 1, "layers.0.mlp": 2}, "here")
    assert equal.find("model.layers.0.mlp") == equal.find("layers.0.mlp.up_proj") == (2,)
    assert equal.find("model.layers.1.mlp") == (1,)


def test_a_table_that_contradicts_itself() -> None:
    with pytest.raises(CheckpointError, match=r"describes model\.layers\.0\.up twice"):
        ModuleTable({"layers.0.up": 1, "model.layers.0.up": 2}, "here")


def test_an_expression_that_is_none() -> None:
    with pytest.raises(CheckpointError, match="re:\\( is no regular expression"):
        ModulePatterns(["re:("], "here")
