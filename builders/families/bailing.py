"""Ling 3.0 (BailingMoeV3): bounded Kimi Delta Attention, gated latent attention with RoPE, grouped MoE with trained limits."""

from __future__ import annotations

import math

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, MtpBlueprint
from trtllm_replayssm.builders.families.kimi_linear import LATENT_EPSILON
from trtllm_replayssm.builders.families.parts import (
    kda_sources,
    listed_types,
    mla_sources,
    numbered_mtp,
    sigmoid_moe_sources,
    swiglu_sources,
)
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.network.base import Rope

#: Switches of this line of models that are off (or absent) in Ling 3.0.
OFF = (
    *("up_proj_norm", "value_norm", "use_nGPT", "scale_router_input", "use_mla_nope", "use_bias", "use_qkv_bias"),
    *("attention_bias", "mtp_use_kda", "use_kda_lora", "norm_head", "linear_silu", "use_sliding_window"),
)
#: Values that are part of what is implemented.
FIXED = {
    "hidden_act": "silu",
    "no_kda_lora": True,
    "rope_interleave": True,
    "rope_scaling": None,
    "linear_attention": "kda",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_enable_expert_bias": True,
    "use_rmsnorm": True,
}
#: The file's partial_rotary_factor does not apply to the rope channels; use_qk_norm is the latent's norm, always there.
IGNORED = (
    *("partial_rotary_factor", "use_qk_norm", "qk_head_dim", "max_position_embeddings", "pretraining_tp"),
    *("mtp_loss_scaling_factor", "router_dtype", "moe_router_dtype", "seq_aux", "sliding_window"),
)


class Bailing(BlueprintFamily):
    """Tensors ``model.layers.N.{attention, mlp}.*``; the MTP layer follows the last one under the next number."""

    architectures = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
    aliases = {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }

    def read(self) -> Blueprint:
        config = self.config
        for key in OFF:
            config.expect(key, False)
        for key, value in FIXED.items():
            config.expect(key, value)
        config.ignore(*IGNORED)
        self.heads, self.epsilon = config.positive("num_attention_heads"), config.positive_number("rms_norm_eps")
        self.count, self.dense = config.positive("num_hidden_layers"), config.count("first_k_dense_replace")
        for key in ("num_key_value_heads", "linear_num_heads"):
            config.expect(key, self.heads)
        kinds = self.layer_types()
        self.kda, self.mla = self.read_kda(), self.read_mla()
        branches: list[Branch] = []
        for i, kind in enumerate(kinds):
            branches += self.block(i, kind)
        embedding = self.pick("model.word_embeddings.weight", "model.embed_tokens.weight")
        return Blueprint(
            vocab_size=self.vocabulary(embedding),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=tuple(branches),
            embedding=embedding,
            final_norm="model.norm.weight",
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            mtp=self.mtp(),
        )

    def layer_types(self) -> list[str]:
        """The last layer of every group is latent attention, and so is each one behind the last whole group.

        A save by transformers lists the kinds: its own rule leaves the layers behind the last whole group linear.
        """
        config, group = self.config, self.config.positive("layer_group_size")
        whole = self.count // group * group
        words = ("linear_attention", "full_attention")
        kinds = [words[(i + 1) % group == 0 or i >= whole] for i in range(self.count)]
        if "layer_types" in config:
            kinds = listed_types(config, "layer_types", words)
        config.expect("mlp_layer_types", ["dense"] * self.dense + ["sparse"] * (self.count - self.dense))
        return kinds

    def read_kda(self) -> Kda:
        config = self.config
        # A save by transformers puts the width of the rope channels into head_dim, and keeps ours as linear_head_dim.
        head_dim = config.positive("head_dim")
        bound = config.number("kda_lower_bound", 0.0)
        if config.flag("kda_safe_gate") and not bound < 0:
            raise config.fail("kda_lower_bound", f"is {bound:g}; a bounded gate needs a negative one")
        return Kda(
            num_heads=self.heads,
            head_dim=config.positive("linear_head_dim", head_dim),
            conv_kernel=config.positive("short_conv_kernel_size"),
            norm_epsilon=self.epsilon,
            lower_bound=bound if config.flag("kda_safe_gate") else None,
            conv_float32=True,
        )

    def read_mla(self) -> Mla:
        config = self.config
        config.expect("gated_attention_proj_granularity_type", "head_wise", "element_wise")
        by_head = config.text("gated_attention_proj_granularity_type", "head_wise") == "head_wise"
        rank = config.positive("q_lora_rank") if "q_lora_rank" in config else None
        rope_dim = config.positive("qk_rope_head_dim")
        config.expect("rotary_dim", rope_dim)
        return Mla(
            num_heads=self.heads,
            kv_rank=config.positive("kv_lora_rank"),
            nope_dim=config.positive("qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=config.positive("v_head_dim"),
            latent_epsilon=LATENT_EPSILON,
            q_rank=rank,
            q_epsilon=LATENT_EPSILON if rank else None,
            rope=Rope(rope_dim, self.rope_theta(), interleaved=True),
            gate="head" if by_head else "element",
        )

    def rope_theta(self) -> float:
        config = self.config
        level = config
        if "rope_parameters" in config:
            level = config.section("rope_parameters")
            level.expect("rope_type", "default")
            level.ignore("partial_rotary_factor")
        theta = level.positive_number("rope_theta")
        stated = config.positive_number("rope_theta", theta)
        if stated != theta:
            raise config.fail("rope_theta", f"is {stated:g}, but {theta:g} in rope_parameters")
        if level is not config:
            level.finish()
        return theta

    def block(self, index: int, kind: str) -> tuple[Branch, Branch]:
        prefix = f"model.layers.{index}."
        attention = f"{prefix}attention."
        norm = f"{prefix}input_layernorm.weight"
        if kind == "full_attention":
            mixer = Branch(norm, self.mla, mla_sources(attention, self.mla, "dense.weight"))
        else:
            # transformers writes every output matrix as dense.
            out = self.pick(f"{attention}o_proj.weight", f"{attention}dense.weight").removeprefix(attention)
            mixer = Branch(norm, self.kda, kda_sources(attention, self.kda, out))
        norm = f"{prefix}post_attention_layernorm.weight"
        if index < self.dense:
            mlp = Mlp(self.config.positive("intermediate_size"), "swiglu")
            return mixer, Branch(norm, mlp, swiglu_sources(f"{prefix}mlp."))
        moe = self.moe(
            self.limit("expert_swiglu_limit_list", index), self.limit("share_expert_swiglu_limit_list", index)
        )
        names = ("gate_proj", "up_proj", "down_proj")
        return mixer, Branch(norm, moe, sigmoid_moe_sources(f"{prefix}mlp.", moe, "expert_bias", names))

    def limit(self, key: str, index: int) -> float | None:
        """The trained SwiGLU limit of a layer: the list has one entry a layer, 0 or null for none.

        Layers behind the list's end (MTP) have none.
        """
        limits = self.config.get(key, [])
        if not isinstance(limits, list) or (limits and len(limits) < self.count):
            raise self.config.fail(key, f"is {limits!r}; expected one number for each of {self.count} layers")
        limit = limits[index] if index < len(limits) else None
        if limit is not None and (type(limit) not in (int, float) or not 0 <= limit < math.inf):
            raise self.config.fail(key, f"holds {limit!r}; expected a finite number that is not negative")
        return float(limit) if limit else None

    def moe(self, limit: float | None, shared_limit: float | None) -> Moe:
        config = self.config
        width, shared = config.positive("moe_intermediate_size"), config.count("num_shared_experts")
        shared_width = config.positive("moe_shared_expert_intermediate_size", width * max(shared, 1))
        return Moe(
            num_experts=config.positive("num_experts"),
            top_k=config.positive("num_experts_per_tok"),
            intermediate_size=width,
            activation="swiglu",
            router="sigmoid",
            normalise=config.flag("norm_topk_prob"),
            routed_scale=config.positive_number("routed_scaling_factor"),
            n_group=config.positive("n_group"),
            topk_group=config.positive("topk_group"),
            limit=limit,
            shared=Mlp(shared_width, "swiglu", limit=shared_limit) if shared else None,
        )

    def mtp(self) -> MtpBlueprint | None:
        prefix = f"model.layers.{self.count}."
        self.config.expect("num_nextn_predict_layers", 0, 1)
        if not self.wants_mtp(self.config.count("num_nextn_predict_layers", 0), prefix):
            return None
        return numbered_mtp(prefix, "final_layernorm.weight", self.block(self.count, "full_attention"))
