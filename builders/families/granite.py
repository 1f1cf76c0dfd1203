"""Granite 4: blocks of Mamba-2 or attention, then SwiGLU beside a mixture of experts, with a factor on every branch."""

from __future__ import annotations

from dataclasses import replace

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, Sources
from trtllm_replayssm.builders.families.config_parts import (
    MAMBA_KEYS,
    ROPE_KEYS,
    expanded,
    head_dim,
    prefixed_mamba2,
    required_rope,
)
from trtllm_replayssm.builders.families.parts import gqa_sources, listed_types, mamba2_sources, plain, with_prefix
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe

#: Words of ``layer_types`` on the hub, and after a save by transformers 5.
KINDS = {
    "mamba": "mamba",
    "attention": "attention",
    "linear_attention": "mamba",
    "full_attention": "attention",
}


class Granite(BlueprintFamily):
    """Tensors ``model.layers.N.{mamba, self_attn, shared_mlp, block_sparse_moe}``. Some members have no Mamba-2 layer."""

    architectures = ("GraniteMoeHybridForCausalLM",)
    aliases = {"layers_block_type": "layer_types"}

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        config.expect("normalization_function", "rmsnorm")
        config.ignore("max_position_embeddings", "init_method", *MAMBA_KEYS)
        self.epsilon = config.positive_number("rms_norm_eps")
        self.residual = config.positive_number("residual_multiplier")
        kinds = [KINDS[kind] for kind in listed_types(config, "layer_types", tuple(KINDS))]
        mixers = {kind: getattr(self, kind)() for kind in dict.fromkeys(kinds)}
        if "mamba" not in mixers:
            self.notes.append("this model has no recurrent layer: ReplaySSM has nothing to replay in it")
        mlp = self.mlp()
        branches: list[Branch] = []
        for i, kind in enumerate(kinds):
            prefix, mixer = f"model.layers.{i}.", mixers[kind]
            sources = mixer_sources(prefix, mixer)
            branches.append(Branch(f"{prefix}input_layernorm.weight", mixer, sources))
            branches.append(Branch(f"{prefix}post_attention_layernorm.weight", mlp, mlp_sources(prefix, mlp)))
        return self.usual_blueprint(
            branches,
            self.epsilon,
            embedding_scale=config.positive_number("embedding_multiplier"),
            logits_scale=1 / config.positive_number("logits_scaling"),
        )

    def mamba(self) -> Mamba2:
        mamba = prefixed_mamba2(self.config, self.epsilon, expanded(self.config))
        return replace(mamba, output_scale=self.residual)

    def attention(self) -> Attention:
        config = self.config
        config.expect("position_embedding_type", "nope", "rope")
        channels = head_dim(config)
        rotates = config.get("position_embedding_type") == "rope"
        config.ignore(*ROPE_KEYS)
        return Attention(
            num_heads=config.positive("num_attention_heads"),
            num_kv_heads=config.positive("num_key_value_heads"),
            head_dim=channels,
            scale=config.positive_number("attention_multiplier"),
            rope=required_rope(config, channels) if rotates else None,
            output_scale=self.residual,
        )

    def mlp(self) -> Mlp | Moe:
        """SwiGLU alone, or beside experts, which are weighted by a softmax over the chosen ones."""
        config = self.config
        shared = Mlp(config.positive("shared_intermediate_size"), "swiglu")
        if not config.count("num_local_experts"):
            config.ignore("intermediate_size", "num_experts_per_tok")
            return replace(shared, output_scale=self.residual)
        return Moe(
            num_experts=config.positive("num_local_experts"),
            top_k=config.positive("num_experts_per_tok"),
            intermediate_size=config.positive("intermediate_size"),
            activation="swiglu",
            router="softmax",
            shared=shared,
            output_scale=self.residual,
        )


def mixer_sources(prefix: str, mixer: Mamba2 | Attention) -> Sources:
    if isinstance(mixer, Mamba2):
        return mamba2_sources(f"{prefix}mamba.", mixer)
    return gqa_sources(f"{prefix}self_attn.")


def mlp_sources(prefix: str, layer: Mlp | Moe) -> Sources:
    """Gate and up rows are fused as ours are, in SwiGLU and in the experts."""
    shared = plain(f"{prefix}shared_mlp.", {"up.weight": "input_linear.weight", "down.weight": "output_linear.weight"})
    if isinstance(layer, Mlp):
        return shared
    names = {"experts.up.weight": "input_linear.weight", "experts.down.weight": "output_linear.weight"}
    names["router.weight"] = "router.layer.weight"
    return plain(f"{prefix}block_sparse_moe.", names) | with_prefix("shared.", shared)
