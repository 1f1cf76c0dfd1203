"""OLMo-Hybrid: Gated DeltaNet with beta up to 2, and attention whose norms stand behind its branches."""

from __future__ import annotations

from dataclasses import replace

from trtllm_replayssm.builders.families.base import conv_taps, rows
from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, Sources
from trtllm_replayssm.builders.families.config_parts import head_dim, optional_rope, prefixed_gated_delta
from trtllm_replayssm.builders.families.parts import gqa_sources, listed_types, plain, swiglu_sources
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp

#: Of the norm of Gated DeltaNet's output, whatever rms_norm_eps is.
OUTPUT_EPSILON = 1e-5
#: Ranges of initial values.
TRAINING_KEYS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")


class OlmoHybrid(BlueprintFamily):
    """Tensors ``model.layers.N.{linear_attn, self_attn, mlp}``; each of the two kinds of layers has its own norms."""

    architectures = ("OlmoHybridForCausalLM",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        config.expect("linear_use_gate", True)
        config.ignore("max_position_embeddings", *TRAINING_KEYS)
        self.epsilon = config.positive_number("rms_norm_eps")
        attention, beta_scale = self.attention(), 2.0 if config.flag("linear_allow_neg_eigval") else 1.0
        delta = prefixed_gated_delta(config, OUTPUT_EPSILON, beta_scale)
        mlp = Mlp(config.positive("intermediate_size"), "swiglu")
        branches: list[Branch] = []
        for i, kind in enumerate(listed_types(config, "layer_types", ("linear_attention", "full_attention"))):
            prefix = f"model.layers.{i}."
            first, second = self.norms(prefix, kind)
            after = kind == "full_attention"
            if after:
                sources = gqa_sources(f"{prefix}self_attn.", normed=True)
                branches.append(Branch(first, attention, sources))
            else:
                branches.append(Branch(first, delta, gated_delta_sources(f"{prefix}linear_attn.")))
            sources = swiglu_sources(f"{prefix}mlp.")
            branches.append(Branch(second, replace(mlp, norm_after=after), sources))
        return self.usual_blueprint(branches, self.epsilon)

    def norms(self, prefix: str, kind: str) -> tuple[str, str]:
        """Norms of a layer's mixer and MLP; transformers writes one of those of attention under another name."""
        if kind == "linear_attention":
            return f"{prefix}attention_layer_norm.weight", f"{prefix}feedforward_layer_norm.weight"
        first = self.pick(f"{prefix}post_attention_layernorm.weight", f"{prefix}feedforward_layer_norm.weight")
        return first, f"{prefix}post_feedforward_layernorm.weight"

    def attention(self) -> Attention:
        """The released models state no theta, and do not rotate; transformers assumes one where rope_parameters is null."""
        config, channels = self.config, head_dim(self.config)
        heads = config.positive("num_attention_heads")
        return Attention(
            num_heads=heads,
            num_kv_heads=config.positive("num_key_value_heads", heads),
            head_dim=channels,
            scale=channels**-0.5,
            rope=optional_rope(config, channels),
            qk_norm_epsilon=self.epsilon,
            qk_norm_joint=True,
            norm_after=True,
        )


def gated_delta_sources(prefix: str) -> Sources:
    """Each projection and each convolution has its tensor. transformers writes the three convolutions as equal parts of their
    rows, which makes no difference once they stand behind each other."""
    names = {"norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}
    names |= {name: name for name in ("A_log", "dt_bias")}
    return plain(prefix, names) | {
        "in_proj.weight": rows(*(f"{prefix}{part}_proj.weight" for part in "qkvgba")),
        "conv1d.weight": conv_taps(*(f"{prefix}{part}_conv1d.weight" for part in "qkv")),
    }
