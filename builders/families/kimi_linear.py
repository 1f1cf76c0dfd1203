"""Kimi-Linear: Kimi Delta Attention with the softplus gate, latent attention without position embedding, sigmoid MoE."""

from __future__ import annotations

from typing import Any, ClassVar

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, Sources
from trtllm_replayssm.builders.families.parts import (
    kda_sources,
    listed_types,
    mla_sources,
    sigmoid_moe_sources,
    swiglu_sources,
)
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe

#: Epsilon of the latent norm: a constant of the model's code, not rms_norm_eps.
LATENT_EPSILON = 1e-6
#: Values that are part of what is implemented.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mla_use_nope": True,
    "q_lora_rank": None,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_nextn_predict_layers": 0,
}
#: Keys that only sparse layers read; a model without such layers may still state them.
SPARSE_ONLY = (
    *("moe_intermediate_size", "moe_renormalize", "num_experts", "num_experts_per_token", "num_shared_experts"),
    *("num_expert_group", "topk_group", "routed_scaling_factor"),
)


class KimiLinear(BlueprintFamily):
    """Tensors ``model.layers.N.{self_attn, mlp, block_sparse_moe}.*``; no MTP.

    fixed: values that are part of what is implemented, by key.
    """

    fixed: ClassVar[dict[str, Any]] = FIXED
    prefix = "model."
    architectures = ("KimiLinearForCausalLM",)
    aliases = {
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }

    def read(self) -> Blueprint:
        config = self.config
        for key, value in self.fixed.items():
            config.expect(key, value)
        # head_dim is meaningless here, and there is no RoPE to be scaled.
        config.ignore("head_dim", "qk_head_dim", "model_max_length", "max_position_embeddings", "pretraining_tp")
        config.ignore("rope_theta", "rope_scaling", "rope_parameters", "moe_router_dtype")
        heads = config.positive("num_attention_heads")
        if config.positive("num_key_value_heads", heads) != heads:
            raise config.fail("num_key_value_heads", f"is not num_attention_heads, {heads}")
        self.epsilon = config.positive_number("rms_norm_eps")
        kinds, mlps = self.layer_types(), self.mlp_types()
        if "sparse" not in mlps:
            config.ignore(*SPARSE_ONLY)
        branches: list[Branch] = []
        for i, (kind, mlp) in enumerate(zip(kinds, mlps)):
            branches += self.block(f"{self.prefix}layers.{i}.", kind, mlp == "sparse")
        return self.assembled(branches)

    def assembled(self, branches: list[Branch]) -> Blueprint:
        """The model around its branches."""
        return self.usual_blueprint(branches, self.epsilon)

    def layer_types(self) -> list[str]:
        """Kind of every layer. The hub states them in linear_attn_config, a save by transformers in layer_types."""
        config = self.config
        if "linear_attn_config" not in config and "linear_num_heads" in config:
            self.kda = self.read_kda(config, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
            return listed_types(config, "layer_types", ("linear_attention", "full_attention"))
        linear = config.section("linear_attn_config")
        self.kda = self.read_kda(linear, "num_heads", "head_dim", "short_conv_kernel_size")
        kinds = self.numbered_types(linear)
        linear.finish()
        for key, value in {
            "layer_types": kinds,
            "linear_num_heads": self.kda.num_heads,
            "linear_head_dim": self.kda.head_dim,
            "linear_conv_kernel_dim": self.kda.conv_kernel,
        }.items():
            config.expect(key, value)
        return kinds

    def read_kda(self, section: HfConfig, heads: str, head_dim: str, kernel: str) -> Kda:
        return Kda(
            num_heads=section.positive(heads),
            head_dim=section.positive(head_dim),
            conv_kernel=section.positive(kernel),
            norm_epsilon=self.epsilon,
            gate_rank=section.positive(head_dim),
        )

    def numbered_types(self, linear: HfConfig) -> list[str]:
        """Kinds from the lists of linear_attn_config, which count from 1 and must cover every layer once."""
        lists = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
        kinds: dict[int, str] = {}
        listed = 0
        for key, kind in lists.items():
            numbers = linear.get(key, [])
            if not isinstance(numbers, list):
                raise linear.fail(key, f"is {numbers!r}; expected a list of layer numbers")
            kinds |= dict.fromkeys(numbers, kind)
            listed += len(numbers)
        count = self.config.positive("num_hidden_layers")
        if listed != count or set(kinds) != set(range(1, count + 1)):
            raise linear.fail("kda_layers and full_attn_layers", f"must name each of the layers 1 to {count} once")
        return [kinds[number] for number in range(1, count + 1)]

    def mlp_types(self) -> list[str]:
        """MLP kind of every layer: the first ones are dense, or as a save by transformers lists them."""
        config, count = self.config, self.config.positive("num_hidden_layers")
        if "first_k_dense_replace" not in config:
            return listed_types(config, "mlp_layer_types", ("dense", "sparse"))
        dense = config.count("first_k_dense_replace")
        kinds = ["dense" if i < dense else "sparse" for i in range(count)]
        config.expect("mlp_layer_types", kinds)
        return kinds

    def block(self, prefix: str, kind: str, sparse: bool) -> tuple[Branch, Branch]:
        attention = f"{prefix}self_attn."
        if kind == "full_attention":
            mla = self.mla()
            mixer = Branch(f"{prefix}input_layernorm.weight", mla, mla_sources(attention, mla, "o_proj.weight"))
        else:
            sources = kda_sources(attention, self.kda, "o_proj.weight")
            mixer = Branch(f"{prefix}input_layernorm.weight", self.kda, sources)
        norm = f"{prefix}post_attention_layernorm.weight"
        if sparse:
            moe = self.moe()
            return mixer, Branch(norm, moe, self.moe_sources(f"{prefix}block_sparse_moe.", moe))
        # transformers writes dense layers under the name of the sparse ones.
        gate = self.pick(f"{prefix}mlp.gate_proj.weight", f"{prefix}block_sparse_moe.gate_proj.weight")
        mlp = self.mlp(self.config.positive("intermediate_size"))
        return mixer, Branch(norm, mlp, swiglu_sources(gate.removesuffix("gate_proj.weight")))

    def mla(self) -> Mla:
        config = self.config
        return Mla(
            num_heads=config.positive("num_attention_heads"),
            kv_rank=config.positive("kv_lora_rank"),
            nope_dim=config.positive("qk_nope_head_dim"),
            rope_dim=config.positive("qk_rope_head_dim"),
            value_dim=config.positive("v_head_dim"),
            latent_epsilon=LATENT_EPSILON,
        )

    def mlp(self, width: int) -> Mlp:
        return Mlp(width, "swiglu")

    def moe_sources(self, prefix: str, moe: Moe) -> Sources:
        return sigmoid_moe_sources(prefix, moe, "e_score_correction_bias", ("w1", "w3", "w2"))

    def moe(self) -> Moe:
        config = self.config
        shared, width = config.count("num_shared_experts"), config.positive("moe_intermediate_size")
        return Moe(
            num_experts=config.positive("num_experts"),
            top_k=config.positive("num_experts_per_token"),
            intermediate_size=width,
            activation="swiglu",
            router="sigmoid",
            normalise=config.flag("moe_renormalize"),
            routed_scale=config.positive_number("routed_scaling_factor"),
            n_group=config.positive("num_expert_group"),
            topk_group=config.positive("topk_group"),
            shared=self.mlp(shared * width) if shared else None,
        )
