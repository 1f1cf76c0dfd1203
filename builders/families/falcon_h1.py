"""Falcon-H1: Mamba-2 and attention side by side, then SwiGLU; fixed factors stand at all inputs and outputs."""

from __future__ import annotations

from dataclasses import replace

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch
from trtllm_replayssm.builders.families.config_parts import (
    expanded,
    head_dim,
    multipliers,
    prefixed_mamba2,
    required_rope,
)
from trtllm_replayssm.builders.families.parts import gqa_sources, mamba2_sources, swiglu_sources, with_prefix
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.side_by_side import SideBySide


class FalconH1(BlueprintFamily):
    """Tensors ``model.layers.N.{mamba, self_attn, feed_forward}``; mamba and self_attn share one norm."""

    architectures = ("FalconH1ForCausalLM",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("mamba_use_mlp", True)
        config.expect("attn_layer_indices", [])
        for key in ("attention_bias", "mlp_bias", "projectors_bias"):
            config.expect(key, False)
        # The width of SwiGLU is stated by itself.
        config.ignore("max_position_embeddings", "mlp_expansion_factor")
        self.epsilon = config.positive_number("rms_norm_eps")
        mamba, attention, mlp = self.mamba(), self.attention(), self.mlp()
        mixer = SideBySide((mamba, attention))
        branches: list[Branch] = []
        for i in range(config.positive("num_hidden_layers")):
            prefix = f"model.layers.{i}."
            sources = with_prefix("mamba2.", mamba2_sources(f"{prefix}mamba.", mamba))
            sources |= with_prefix("attention.", gqa_sources(f"{prefix}self_attn."))
            branches.append(Branch(f"{prefix}input_layernorm.weight", mixer, sources))
            sources = swiglu_sources(f"{prefix}feed_forward.")
            branches.append(Branch(f"{prefix}pre_ff_layernorm.weight", mlp, sources))
        return self.usual_blueprint(
            branches,
            self.epsilon,
            "model.final_layernorm.weight",
            embedding_scale=config.positive_number("embedding_multiplier"),
            logits_scale=config.positive_number("lm_head_multiplier"),
        )

    def mamba(self) -> Mamba2:
        config = self.config
        normed = config.flag("mamba_rms_norm")
        if normed:
            config.expect("mamba_norm_before_gate", False)
        config.ignore("mamba_norm_before_gate")
        inner = config.positive("mamba_d_ssm", expanded(config))
        scales = multipliers(config, "ssm_multipliers", 5)
        mamba = prefixed_mamba2(config, self.epsilon if normed else None, inner, scales)
        if mamba.inner_size != inner:
            raise config.fail("mamba_d_ssm", f"is {inner}, but its heads have {mamba.inner_size} channels")
        return replace(
            mamba,
            input_scale=config.positive_number("ssm_in_multiplier"),
            output_scale=config.positive_number("ssm_out_multiplier"),
        )

    def attention(self) -> Attention:
        config, channels = self.config, head_dim(self.config)
        return Attention(
            num_heads=config.positive("num_attention_heads"),
            num_kv_heads=config.positive("num_key_value_heads"),
            head_dim=channels,
            # A factor of the keys is one of the scores.
            scale=channels**-0.5 * config.positive_number("key_multiplier"),
            rope=required_rope(config, channels),
            input_scale=config.positive_number("attention_in_multiplier"),
            output_scale=config.positive_number("attention_out_multiplier"),
        )

    def mlp(self) -> Mlp:
        gate, down = multipliers(self.config, "mlp_multipliers", 2)
        return Mlp(self.config.positive("intermediate_size"), "swiglu", gate_scale=gate, output_scale=down)
