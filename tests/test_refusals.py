"""Models that are recognised and not built, and configs that do not describe what is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hf_models import build
from hf_spelling import write_hub
from test_published_sizes import CONFIGS, SIZES

from trtllm_replayssm.builders.families.kimi_k3 import KimiK3
from trtllm_replayssm.builders.families.kimi_linear import KimiLinear
from trtllm_replayssm.builders.families.refused import REFUSED
from trtllm_replayssm.builders.families.registry import BY_ARCHITECTURE, BY_MODEL_TYPE, find_family, recognise
from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError

Config = dict[str, Any]


def config(name: str, **changes: Any) -> Config:
    """A published config with changes to its text level; None removes a key."""
    values = read_config(CONFIGS / f"{name}.json")
    text = values.get("text_config", values)
    text |= changes
    for key in [key for key, value in changes.items() if value is None]:
        del text[key]
    return values


# ---- other architectures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_known_but_not_built(name: str) -> None:
    """By class name or by model_type, and inside a wrapper, the refusal names the model and says why."""
    key = {"architectures": [name]} if name[0].isupper() or name.endswith("CausalLM") else {"model_type": name}
    for values in (key, {"architectures": ["SomeWrapper"], "text_config": key}):
        with pytest.raises(UnsupportedModelError) as refused:
            find_family(values, {})
        assert name in refused.value.message
        assert REFUSED[name] in refused.value.message


def test_what_is_built_is_not_refused() -> None:
    assert not set(REFUSED) & (set(BY_ARCHITECTURE) | set(BY_MODEL_TYPE))


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"model_type": "gpt2"},
        {"architectures": "DeepseekV3ForCausalLM"},
        {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}},
    ],
    ids=str,
)
def test_plain_transformers_are_refused_by_name(values: Config) -> None:
    name = values.get("architectures", values.get("model_type"))
    with pytest.raises(UnsupportedModelError, match=name if isinstance(name, str) else name[0]) as refused:
        find_family(values, {})
    assert "Nemotron-H" in refused.value.hint


@pytest.mark.parametrize(
    "values",
    [{}, {"architectures": [], "model_type": None}, {"architectures": [None]}, {"architectures": 5, "model_type": []}],
    ids=str,
)
def test_a_config_without_a_name_is_refused(values: Config) -> None:
    with pytest.raises(UnsupportedModelError, match="neither architectures nor model_type"):
        find_family(values, {})


@pytest.mark.parametrize(
    ("ssm_cfg", "reason"),
    # Without a layer's name, the package builds Mamba-1.
    [({}, "Mamba-1"), (None, "Mamba-1"), ({"layer": "Mamba1"}, "Mamba-1"), ({"layer": "Mamba3"}, "Mamba3")],
)
def test_state_spaces_checkpoints_of_other_layers(ssm_cfg: Config | None, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as refused:
        find_family(read_config(CONFIGS / "mamba2_2_7b.json") | {"ssm_cfg": ssm_cfg}, {})
    assert "state-spaces" in refused.value.message


@pytest.mark.parametrize(
    "key",
    ["norm_before_gate", "D_has_hdim", "headdim", "d_ssm", "some_new_switch", "dt_limit", "rmsnorm"],
)
def test_sizes_and_switches_of_state_spaces_layers(key: str) -> None:
    wrong = {"headdim": 48, "d_ssm": 64, "dt_limit": [0.1, 0.0], "rmsnorm": False}.get(key, True)
    values = read_config(CONFIGS / "mamba2_2_7b.json")
    with pytest.raises(UserError, match="time_step_limit" if key == "dt_limit" else key):
        find_family(values | {"ssm_cfg": {"layer": "Mamba2", key: wrong}}, {})


K3_TEXT = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": K3_TEXT},
        {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}},
        K3_TEXT | {"linear_attn_config": {"gate_lower_bound": -5.0}},
        K3_TEXT | {"linear_attn_config": {"use_full_rank_gate": True}},
        K3_TEXT | {"attn_res_block_size": 12},
        {"model_type": "kimi_linear", "routed_expert_hidden_size": 3584},
        {"text_config": K3_TEXT | {"mla_use_output_gate": True}},
    ],
    ids=[
        "wrapper",
        "wrapper without class",
        "bounded gate",
        "full-rank gate",
        "attention residuals",
        "model_type only",
        "nested",
    ],
)
def test_kimi_k3_is_not_taken_for_kimi_linear(values: Config) -> None:
    """The text config of K3 carries the class name of Kimi-Linear."""
    assert recognise(values) is KimiK3
    assert recognise(K3_TEXT) is KimiLinear


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": None}, "hidden_act is missing"),
        # Factors of SiTU without SiTU.
        ({"hidden_act": "silu"}, "activation_situ_beta"),
        ({"activation_situ_beta": 0.0}, "expected a positive number"),
        ({"activation_situ_linear_beta": -25.0}, "expected a positive number"),
        ({"attn_res_block_size": 0}, "must be 1 or more"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"linear_attn_config": {"gate_lower_bound": 0.0}}, "needs a negative one"),
        ({"linear_attn_config": {"some_switch": True}}, "some_switch"),
        ({"some_switch": True}, "some_switch"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_kimi_k3_does_not_implement(change: Config, said: str) -> None:
    values = config("kimi_k3")
    for key, value in change.items():
        nested = values["text_config"].get(key) if isinstance(value, dict) else None
        values["text_config"][key] = value if nested is None else nested | value
    with pytest.raises(UserError, match=said):
        find_family(values, {})


def test_groups_of_experts_and_wrappers_of_kimi_k3() -> None:
    values = config("kimi_k3")
    with pytest.raises(UserError, match="some_switch"):
        find_family(values | {"some_switch": True}, {})
    values["text_config"]["topk_group"] = 0
    with pytest.raises(UserError, match="topk_group"):
        find_family(values, {})


def test_bailing_hybrid_names_two_architectures() -> None:
    """Ling 2.5 and 2.6 share Ling 3.0's model_type, but have lightning attention."""
    ling_3 = config("ling_3_flash")
    del ling_3["architectures"]
    assert find_family(ling_3, {}).decoder().layers[0].kind == "kda"
    ling_26 = {"model_type": "bailing_hybrid", "layer_group_size": 8, "group_norm_size": 4, "linear_silu": False}
    with pytest.raises(UnsupportedModelError, match="lightning"):
        find_family(ling_26, {})


def test_puzzle_variants_of_nemotron_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="block_configs"):
        find_family(config("nemotron_nano_v2_9b", block_configs=[{"mamba_num_heads": 64}]), {})


#: The last layer attends, so that its indexer counts.
GLM_ENDS = ["linear_attention"] * 44 + ["deepseek_sparse_attention"]

# ---- configs of what is built ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_unknown_keys_that_are_on_are_refused(name: str) -> None:
    """Ling's trained limits, ignored by every converter at first, are the reason for this rule."""
    with pytest.raises(UnsupportedModelError, match="some_new_switch = 3"):
        find_family(config(name, some_new_switch=3), {})
    find_family(config(name, some_new_switch=False, another=0, third=[]), {})


def test_unknown_keys_of_a_wrapper_are_refused() -> None:
    values = read_config(CONFIGS / "qwen3_5_27b.json") | {"audio_config": {"layers": 3}}
    with pytest.raises(UnsupportedModelError, match="audio_config"):
        find_family(values, {})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("nemotron_nano_v2_9b", {"attention_bias": True}, "attention_bias is true"),
        ("nemotron_nano_v2_9b", {"mamba_proj_bias": True}, "mamba_proj_bias is true"),
        ("nemotron_nano_v2_9b", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_nano_v2_9b", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("nemotron_nano_v2_9b", {"sliding_window": 4096}, "sliding_window"),
        ("nemotron_3_nano_30b_a3b", {"n_shared_experts": 2}, "n_shared_experts"),
        ("qwen3_next_80b_a3b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("qwen3_next_80b_a3b", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_next_80b_a3b", {"attention_bias": True}, "attention_bias"),
        ("qwen3_5_27b", {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ("qwen3_5_27b", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_27b", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ("qwen3_5_27b", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ("qwen3_5_27b", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type"),
        ("kimi_linear_48b_a3b", {"q_lora_rank": 1536}, "q_lora_rank"),
        ("kimi_linear_48b_a3b", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear_48b_a3b", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi_linear_48b_a3b", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("glm_5_3_flash", {"qk_rope_head_dim": 64}, "qk_rope_head_dim"),
        ("glm_5_3_flash", {"mhc": False}, "mhc"),
        ("glm_5_3_flash", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ("glm_5_3_flash", {"index_kpool_compress": False}, "index_kpool_compress"),
        ("glm_5_3_flash", {"indexer_types": ["full"] * 44 + ["shared"], "layer_types": GLM_ENDS}, "shared indexers"),
        ("glm_5_3_flash", {"indexer_types": None, "index_topk_freq": 4}, "index_topk_freq"),
        ("glm_5_3_flash", {"scoring_func": "softmax"}, "scoring_func"),
        ("qwen3_8_flash_next", {"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ("qwen3_8_flash_next", {"output_gate_type": "tanh"}, "output_gate_type"),
        ("ling_3_flash", {"no_kda_lora": False}, "no_kda_lora"),
        ("ling_3_flash", {"up_proj_norm": True}, "up_proj_norm"),
        ("ling_3_flash", {"value_norm": True}, "value_norm"),
        ("ling_3_flash", {"use_nGPT": True}, "use_nGPT"),
        ("ling_3_flash", {"scale_router_input": True}, "scale_router_input"),
        ("ling_3_flash", {"use_mla_nope": True}, "use_mla_nope"),
        ("ling_3_flash", {"use_qkv_bias": True}, "use_qkv_bias"),
        ("ling_3_flash", {"mtp_use_kda": True}, "mtp_use_kda"),
        ("ling_3_flash", {"rope_interleave": False}, "rope_interleave"),
        ("ling_3_flash", {"linear_attention": "gla"}, "linear_attention"),
        ("ling_3_flash", {"rotary_dim": 32}, "rotary_dim"),
        ("codestral_mamba_7b", {"hidden_act": "gelu"}, "hidden_act"),
        ("codestral_mamba_7b", {"rms_norm": False}, "rms_norm"),
        ("codestral_mamba_7b", {"intermediate_size": 4096}, "intermediate_size"),
        ("mamba2_2_7b", {"attn_layer_idx": [9, 18]}, "attn_layer_idx"),
        ("mamba2_2_7b", {"d_intermediate": 4096}, "d_intermediate"),
        ("granite_4_h_small", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("granite_4_h_small", {"position_embedding_type": "alibi"}, "position_embedding_type"),
        ("granite_4_h_small", {"normalization_function": "layernorm"}, "normalization_function"),
        ("falcon_h1_0_5b", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate"),
        ("falcon_h1_0_5b", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1_0_5b", {"attn_layer_indices": [3]}, "attn_layer_indices"),
        ("falcon_h1_0_5b", {"mamba_use_mlp": False}, "mamba_use_mlp"),
        ("falcon_h1_0_5b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("bamba_9b", {"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        ("bamba_9b", {"attn_rotary_emb": 128}, "attn_rotary_emb"),
        ("olmo_hybrid_7b", {"linear_use_gate": False}, "linear_use_gate"),
        ("olmo_hybrid_7b", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_switches_that_are_not_implemented(name: str, change: Config, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        find_family(config(name, **change), {})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        # transformers would assume 10000; the models were trained with 1e7.
        ("qwen3_next_80b_a3b", {"rope_theta": None}, "rope_theta is missing"),
        ("qwen3_next_80b_a3b", {"partial_rotary_factor": None}, "partial_rotary_factor is missing"),
        ("qwen3_5_27b", {"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ("qwen3_5_27b", {"rope_theta": 1e4}, "rope_theta is 10000"),
        ("qwen3_5_27b", {"head_dim": None}, "head_dim is missing"),
        ("qwen3_5_27b", {"linear_num_value_heads": "48"}, "linear_num_value_heads"),
        ("qwen3_5_27b", {"linear_num_value_heads": 0}, "must be 1 or more"),
        ("qwen3_5_27b", {"linear_num_value_heads": 40}, "no multiple of 16 num_key_heads"),
        ("qwen3_5_27b", {"num_key_value_heads": 5}, "no multiple of 5 num_kv_heads"),
        (
            "qwen3_5_27b",
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}},
            "partial_rotary_factor",
        ),
        ("qwen3_next_80b_a3b", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_next_80b_a3b", {"num_experts_per_tok": 600}, "600 experts a token"),
        ("nemotron_nano_v2_9b", {"n_groups": 7}, "no multiple of 7 n_groups"),
        ("ling_3_flash", {"n_group": 7}, "no multiple of 7 n_group"),
        ("ling_3_flash", {"topk_group": 0}, "must be 1 or more"),
        ("qwen3_5_27b", {"layer_types": ["linear_attention"] * 63}, "must list 64 layers"),
        ("qwen3_5_27b", {"layer_types": ["sliding_attention"] * 64}, "must list 64 layers"),
        ("qwen3_5_27b", {"vocab_size": None}, "vocab_size is missing"),
        ("nemotron_nano_v2_9b", {"hybrid_override_pattern": "M-X*"}, "holds 'X'"),
        ("nemotron_nano_v2_9b", {"hybrid_override_pattern": []}, "expected a pattern"),
        ("nemotron_nano_v2_9b", {"num_hidden_layers": 52}, "num_hidden_layers is 52"),
        ("nemotron_nano_v2_9b", {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        ("nemotron_nano_v2_9b", {"norm_eps": 1e-6}, "layer_norm_epsilon is 1e-05, but norm_eps"),
        ("nemotron_nano_v2_9b", {"time_step_limit": [0.1, 0.0]}, "time_step_limit"),
        ("nemotron_nano_v2_9b", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
        ("nemotron_nano_v2_9b", {"time_step_limit": "inf"}, "time_step_limit"),
        ("granite_4_h_small", {"layer_types": ["mamba"] * 39}, "list of 40 times"),
        ("granite_4_h_small", {"residual_multiplier": 0}, "residual_multiplier is 0"),
        ("granite_4_h_small", {"logits_scaling": None}, "logits_scaling is missing"),
        ("granite_4_h_small", {"position_embedding_type": "rope", "rope_theta": None}, "rope_theta is missing"),
        ("granite_4_h_small", {"mamba_d_head": "auto", "mamba_n_heads": 120}, "mamba_n_heads is 120"),
        ("falcon_h1_0_5b", {"ssm_multipliers": [1.0, 1.0]}, "5 positive numbers"),
        ("falcon_h1_0_5b", {"mlp_multipliers": [1.0, "x"]}, "2 positive numbers"),
        ("falcon_h1_0_5b", {"mamba_d_ssm": 2048}, "mamba_d_ssm is 2048"),
        ("falcon_h1_0_5b", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1e"),
        ("bamba_9b", {"attn_layer_indices": [9, 32]}, "attn_layer_indices"),
        ("bamba_9b", {"head_dim": 34}, "head_dim is 34"),
        ("olmo_hybrid_7b", {"linear_num_value_heads": 45}, "no multiple of 30"),
        ("kimi_linear_48b_a3b", {"linear_attn_config": None}, "linear_attn_config"),
        ("kimi_linear_48b_a3b", {"layer_types": ["linear_attention"] * 27}, "layer_types"),
        ("kimi_linear_48b_a3b", {"num_key_value_heads": 8}, "num_key_value_heads"),
        ("glm_5_3_flash", {"index_topk": 2047}, "no multiple of 4 index_kpool"),
        ("glm_5_3_flash", {"layer_types": ["linear_attention"] * 44}, "not a list of 45"),
        ("glm_5_3_flash", {"layer_types": ["linear_attention"] * 45}, "kda_layers"),
        ("glm_5_3_flash", {"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ("glm_5_3_flash", {"swiglu_limit": None}, "swiglu_limit is missing"),
        ("glm_5_3_flash", {"swiglu_limit": 0}, "swiglu_limit is 0"),
        ("glm_5_3_flash", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("qwen3_8_flash_next", {"indexer_budget": 2047}, "no multiple of 4 indexer_compress_ratio"),
        ("qwen3_8_flash_next", {"indexer_head_dim": 32}, "RoPE turns 64 channels"),
        ("qwen3_8_flash_next", {"ple_layer_ids": [0]}, "layer numbers from 1 to 48"),
        ("qwen3_8_flash_next", {"ple_embed_dim": 2561}, "ple_embed_dim"),
        ("qwen3_8_flash_next", {"ngram_vocab_size_base": 1 << 28}, "rows of n-grams"),
        ("qwen3_8_flash_next", {"eos_token_id": None}, "n-grams end at such a token"),
        ("qwen3_8_flash_next", {"hc_count": None}, "hc_count is missing"),
        ("ling_3_flash", {"expert_swiglu_limit_list": [0, 4.0]}, "one number for each of 42 layers"),
        ("ling_3_flash", {"expert_swiglu_limit_list": [-1.0] * 42}, "not negative"),
        ("ling_3_flash", {"rope_theta": None}, "rope_theta is missing"),
        ("ling_3_flash", {"kda_lower_bound": None}, "kda_lower_bound"),
        ("ling_3_flash", {"num_experts_per_token": 6}, "num_experts_per_tok is 8"),
        ("ling_3_flash", {"topk_group": 9}, "9 groups of experts cannot be chosen from"),
        ("ling_3_flash", {"expert_swiglu_limit_list": [float("inf")] * 42}, "finite number"),
        ("nemotron_3_nano_30b_a3b", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_configs_that_do_not_add_up(name: str, change: Config, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        find_family(config(name, **change), {})


@pytest.mark.parametrize(
    "change",
    [
        # Counted from 0, as GLM does, every layer would be one off.
        lambda linear: linear | {"kda_layers": [i - 1 for i in linear["kda_layers"]]},
        lambda linear: linear | {"full_attn_layers": linear["full_attn_layers"][:-1]},
        lambda linear: linear | {"full_attn_layers": [*linear["full_attn_layers"], 1]},
        lambda linear: linear | {"kda_layers": 20},
    ],
    ids=["from 0", "one missing", "one twice", "no list"],
)
def test_layer_lists_of_kimi_cover_every_layer_once(change: Callable[[Config], Config]) -> None:
    values = config("kimi_linear_48b_a3b")
    values["linear_attn_config"] = change(values["linear_attn_config"])
    with pytest.raises(CheckpointError, match="linear_attn_config"):
        find_family(values, {})


def test_infinity_in_both_spellings(tmp_path: Path) -> None:
    """The hub writes the bare word Infinity, transformers 5 an object; both mean that time steps are not clamped."""
    values = config("nemotron_nano_v2_9b")
    path = tmp_path / "config.json"
    for infinity in (float("inf"), {"__float__": "Infinity"}):
        path.write_text(json.dumps(values | {"time_step_limit": [0.0, infinity]}))
        layer = find_family(read_config(path), {}).decoder().layers[0]
        assert (layer.dt_min, layer.dt_max) == (0.0, float("inf"))


def test_all_four_symbols_of_the_pattern_are_known() -> None:
    """Some loaders raise KeyError at '-'."""
    values = config("nemotron_3_nano_30b_a3b", hybrid_override_pattern="M-*E", num_hidden_layers=4)
    assert [layer.kind for layer in find_family(values, {}).decoder().layers] == ["mamba2", "mlp", "attention", "moe"]


def test_the_outer_tie_wins() -> None:
    values = config("qwen3_5_27b", tie_word_embeddings=True)
    assert not find_family(values, {}).decoder().tie_embeddings
    del values["tie_word_embeddings"]
    assert find_family(values, {}).decoder().tie_embeddings


def test_layers_behind_the_last_whole_group_of_ling_are_attention() -> None:
    layers = find_family(config("ling_3_tiny", num_hidden_layers=6), {}).decoder().layers[::2]
    assert [layer.kind for layer in layers] == ["kda", "kda", "kda", "mla", "mla", "mla"]


VALUES = (None, True, -1, 0, 3, 2**31 - 1, 0.5, float("nan"), float("inf"), "x", [], [None], [1], {}, {"a": 1})


def epsilons_and_thetas(description: Any) -> list[Any]:
    """Every such number in what a decoder says of itself."""
    if isinstance(description, list):
        return [number for item in description for number in epsilons_and_thetas(item)]
    if not isinstance(description, dict):
        return []
    found = [v for k, v in description.items() if k.endswith(("epsilon", "theta")) and v is not None]
    return found + [number for item in description.values() for number in epsilons_and_thetas(item)]


@pytest.mark.parametrize(
    "name",
    [
        *("mamba2", "nemotron_h_latent", "qwen3_next", "qwen3_5_moe_vl", "kimi_linear", "bailing_hybrid"),
        *(
            "glm5_next",
            "qwen4_exp_vl",
            "state_spaces",
            "granite4_moe",
            "granite4_attention",
            "falcon_h1",
            "bamba",
            "olmo_hybrid_rope",
            "lara_mini",
        ),
    ],
)
def test_whatever_a_key_holds_the_answer_is_a_sentence(name: str, tmp_path: Path) -> None:
    """Every key of a config, with values of every type: a model that can be, or a UserError, and no other exception."""
    original = read_config(write_hub(build(name), tmp_path / "hub") / "config.json")
    text = original.get("text_config", original)
    nested = {key: value for key, value in text.items() if isinstance(value, dict)}
    for level in (original, text, *nested.values()):
        for key, value in list(level.items()):
            for wrong in VALUES:
                level[key] = wrong
                with suppress(UserError):
                    numbers = epsilons_and_thetas(find_family(original, {}).decoder().to_dict())
                    assert all(isinstance(number, float) and number > 0 for number in numbers), f"{key} = {wrong}"
            level[key] = value
    find_family(original, {})
