"""Lara-4-Mini: Gated DeltaNet, attention in a sliding window or over everything, and a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from trtllm_replayssm.builders.families.base import conv_taps
from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, Sources
from trtllm_replayssm.builders.families.config_parts import prefixed_gated_delta, required_rope, softmax_moe
from trtllm_replayssm.builders.families.parts import gqa_sources, listed_types, plain, swiglu_sources, with_prefix
from trtllm_replayssm.builders.layers.attention import Attention

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


class Lara(BlueprintFamily):
    """Tensors ``model.layers.N.{linear_attn, self_attn, mlp}``. Attention rotates in its window, and not over everything."""

    architectures = ("LaraMiniForCausalLM",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        config.ignore("max_position_embeddings")
        self.epsilon = config.positive_number("rms_norm_eps")
        sliding, delta = self.sliding(), prefixed_gated_delta(config, self.epsilon)
        moe = softmax_moe(config, config.flag("norm_topk_prob"), shared_gate=False)
        attention = {SLIDING: sliding, FULL: replace(sliding, rope=None, window=None)}
        branches: list[Branch] = []
        for i, kind in enumerate(listed_types(config, "layer_types", (LINEAR, SLIDING, FULL))):
            prefix = f"model.layers.{i}."
            norm = f"{prefix}input_layernorm.weight"
            if kind == LINEAR:
                branches.append(Branch(norm, delta, gated_delta_sources(f"{prefix}linear_attn.")))
            else:
                sources = gqa_sources(f"{prefix}self_attn.", normed=True)
                branches.append(Branch(norm, attention[kind], sources))
            branches.append(Branch(f"{prefix}post_attention_layernorm.weight", moe, moe_sources(f"{prefix}mlp.")))
        return self.usual_blueprint(branches, self.epsilon)

    def sliding(self) -> Attention:
        config, channels = self.config, self.config.positive("head_dim")
        return Attention(
            num_heads=config.positive("num_attention_heads"),
            num_kv_heads=config.positive("num_key_value_heads"),
            head_dim=channels,
            scale=channels**-0.5,
            rope=required_rope(config, channels),
            qk_norm_epsilon=self.epsilon,
            window=config.positive("sliding_window"),
        )


def gated_delta_sources(prefix: str) -> Sources:
    """The rows of in_proj are ours."""
    names = {name: name for name in ("A_log", "dt_bias", "in_proj.weight", "out_proj.weight")}
    names["norm.weight"] = "out_norm.weight"
    return plain(prefix, names) | {"conv1d.weight": conv_taps(f"{prefix}conv1d.weight")}


def moe_sources(prefix: str) -> Sources:
    """Experts are fused as ours are."""
    names = {"router.weight": "gate.weight", "experts.up.weight": "experts.gate_up_proj"}
    names["experts.down.weight"] = "experts.down_proj"
    return plain(prefix, names) | with_prefix("shared.", swiglu_sources(f"{prefix}shared_expert."))
