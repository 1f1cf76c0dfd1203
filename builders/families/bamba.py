"""Bamba: blocks of Mamba-2 or attention with RoPE over half of a head, then SwiGLU."""

from __future__ import annotations

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch
from trtllm_replayssm.builders.families.config_parts import expanded, head_dim, prefixed_mamba2, required_rope
from trtllm_replayssm.builders.families.parts import gqa_sources, mamba2_sources, swiglu_sources
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp

#: Part of a head that is rotated, whether the config says so or not.
ROTATED = 0.5


class Bamba(BlueprintFamily):
    """Tensors ``model.layers.N.{mamba, self_attn, feed_forward}``."""

    architectures = ("BambaForCausalLM",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        for key in ("attention_bias", "mlp_bias"):
            config.expect(key, False)
        # A loss of training.
        config.ignore("max_position_embeddings", "z_loss_coefficient")
        epsilon, attention = config.positive_number("rms_norm_eps"), self.attention()
        mamba = prefixed_mamba2(config, epsilon, expanded(config))
        mlp = Mlp(config.positive("intermediate_size"), "swiglu")
        branches: list[Branch] = []
        for i, attends in enumerate(self.attends()):
            prefix = f"model.layers.{i}."
            norm = f"{prefix}input_layernorm.weight"
            if attends:
                branches.append(Branch(norm, attention, gqa_sources(f"{prefix}self_attn.")))
            else:
                branches.append(Branch(norm, mamba, mamba2_sources(f"{prefix}mamba.", mamba)))
            sources = swiglu_sources(f"{prefix}feed_forward.")
            branches.append(Branch(f"{prefix}pre_ff_layernorm.weight", mlp, sources))
        return self.usual_blueprint(branches, epsilon, "model.final_layernorm.weight")

    def attends(self) -> list[bool]:
        """Whether each layer is attention. Raises CheckpointError for indices that are no layers."""
        config, count = self.config, self.config.positive("num_hidden_layers")
        indices = config.get("attn_layer_indices", [])
        if not isinstance(indices, list) or any(type(i) is not int or not 0 <= i < count for i in indices):
            raise config.fail("attn_layer_indices", f"is {indices!r}; expected numbers of {count} layers")
        return [i in indices for i in range(count)]

    def attention(self) -> Attention:
        config, channels = self.config, head_dim(self.config)
        rope = required_rope(config, channels, ROTATED)
        config.expect("attn_rotary_emb", rope.dim)
        heads, kv_heads = config.positive("num_attention_heads"), config.positive("num_key_value_heads")
        return Attention(heads, kv_heads, channels, channels**-0.5, rope)
