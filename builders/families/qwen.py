"""What Qwen3-Next and Qwen3.5 share: Gated DeltaNet, gated attention with partial RoPE, zero-centred norms."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source, conv_taps
from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, MtpBlueprint, Sources
from trtllm_replayssm.builders.families.config_parts import prefixed_gated_delta, softmax_moe
from trtllm_replayssm.builders.families.parts import expert_sources, plain, swiglu_sources, with_prefix
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.network.base import Rope


class Qwen(BlueprintFamily):
    """Blocks of two branches: Gated DeltaNet or attention, then MLP or MoE.

    attentions: words for attention in ``layer_types``.
    """

    attentions: tuple[str, ...] = ("full_attention",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        config.expect("attention_bias", False)
        config.expect("attn_output_gate", True)
        config.expect("output_gate_type", "swish", "silu")
        config.expect("use_sliding_window", False)
        # Only with use_sliding_window.
        config.ignore("sliding_window", "max_position_embeddings", "mamba_ssm_dtype")
        norm = self.pick("model.norm.weight", "model.language_model.norm.weight", "language_model.model.norm.weight")
        prefix = norm.removesuffix("norm.weight")
        self.epsilon, self.rope = config.positive_number("rms_norm_eps"), self.read_rope()
        branches: list[Branch] = []
        for i, kind in enumerate(self.layer_types()):
            branches += self.block(f"{prefix}layers.{i}.", kind in self.attentions, self.sparse(i))
        head = self.pick("lm_head.weight", "language_model.lm_head.weight")
        return Blueprint(
            vocab_size=self.vocabulary(f"{prefix}embed_tokens.weight"),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=tuple(branches),
            embedding=f"{prefix}embed_tokens.weight",
            final_norm=norm,
            head=head,
            tie_embeddings=self.tied(head),
            norm_zero_centred=True,
            mtp=self.mtp(),
            dropped=dict.fromkeys(("model.visual.", "visual."), "vision tower; only the text model is converted"),
        )

    def read_rope(self) -> Rope:
        """RoPE of the text model. The three axes of the multimodal RoPE coincide for text."""
        config, level = self.config, self.config
        config.expect("rope_scaling", None)
        if "rope_parameters" in config:
            level = config.section("rope_parameters")
            level.expect("rope_type", "default")
            level.ignore("mrope_section", "mrope_interleaved")
        theta = level.positive_number("rope_theta")
        factor = level.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        if level is not config:
            level.finish()
            stated = config.positive_number("rope_theta", theta)
            if stated != theta:
                raise config.fail("rope_theta", f"is {stated:g}, but {theta:g} in rope_parameters")
        elif "partial_rotary_factor" not in config:
            raise config.fail("partial_rotary_factor", "is missing, and no value can be assumed for it")
        channels = config.positive("head_dim") * factor
        if not 0 < factor <= 1 or channels % 2:
            raise config.fail("partial_rotary_factor", f"is {factor:g}, which is no even number of a head's channels")
        return Rope(int(channels), theta)

    def layer_types(self) -> list[str]:
        return layer_types(self.config, ("linear_attention", *self.attentions), "full_attention_interval")

    def sparse(self, index: int) -> bool:
        """Whether the MLP of that layer is a mixture of experts."""
        return self.config.count("num_experts", 0) > 0

    def block(self, prefix: str, attention: bool, sparse: bool) -> tuple[Branch, Branch]:
        if attention:
            full = self.attention()
            mixer = Branch(f"{prefix}input_layernorm.weight", full, self.attention_sources(f"{prefix}self_attn.", full))
        else:
            delta = self.gated_delta()
            sources = self.gated_delta_sources(f"{prefix}linear_attn.", delta)
            mixer = Branch(f"{prefix}input_layernorm.weight", delta, sources)
        norm = f"{prefix}post_attention_layernorm.weight"
        if sparse:
            moe = self.moe()
            return mixer, Branch(norm, moe, self.moe_sources(f"{prefix}mlp.", moe))
        mlp = Mlp(self.config.positive("intermediate_size"), "swiglu")
        return mixer, Branch(norm, mlp, swiglu_sources(f"{prefix}mlp."))

    def attention(self) -> Attention:
        config, head_dim = self.config, self.config.positive("head_dim")
        return Attention(
            num_heads=config.positive("num_attention_heads"),
            num_kv_heads=config.positive("num_key_value_heads"),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=self.rope,
            qk_norm_epsilon=self.epsilon,
            qk_norm_zero_centred=True,
            output_gate=True,
        )

    def attention_sources(self, prefix: str, layer: Attention) -> Sources:
        """q_proj has per head the rows of the query, then those of its gate; ours are all queries, all gates, k, v."""

        def pack(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query, gate = q.unflatten(0, (layer.num_heads, 2, layer.head_dim)).unbind(1)
            return torch.cat((query.flatten(0, 1), gate.flatten(0, 1), k, v))

        names = {"dense.weight": "o_proj.weight", "q_norm.weight": "q_norm.weight", "k_norm.weight": "k_norm.weight"}
        return plain(prefix, names) | {"qkv.weight": Source(tuple(f"{prefix}{x}_proj.weight" for x in "qkv"), pack)}

    def gated_delta(self) -> GatedDelta:
        return prefixed_gated_delta(self.config, self.epsilon)

    def gated_delta_sources(self, prefix: str, layer: GatedDelta) -> Sources:
        names = ("A_log", "dt_bias", "norm.weight", "out_proj.weight")
        conv = {"conv1d.weight": conv_taps(f"{prefix}conv1d.weight")}
        return plain(prefix, {name: name for name in names}) | conv | {"in_proj.weight": self.in_proj(prefix, layer)}

    @abstractmethod
    def in_proj(self, prefix: str, layer: GatedDelta) -> Source:
        """The rows q, k, v, z, b, a from the family's own packing."""

    def moe(self) -> Moe:
        return softmax_moe(self.config, self.config.flag("norm_topk_prob", True), shared_gate=True)

    def moe_sources(self, prefix: str, layer: Moe) -> Sources:
        """Experts are stored one by one, or fused with our rows (gate, then up)."""
        sources = plain(prefix, {"router.weight": "gate.weight", "shared_gate.weight": "shared_expert_gate.weight"})
        sources |= with_prefix("shared.", swiglu_sources(f"{prefix}shared_expert."))
        if f"{prefix}experts.gate_up_proj" in self.tensor_shapes:
            fused = {"experts.up.weight": "experts.gate_up_proj", "experts.down.weight": "experts.down_proj"}
            return sources | plain(prefix, fused)
        return sources | expert_sources(f"{prefix}experts.", layer.num_experts, ("gate_proj", "up_proj"), "down_proj")

    def announced_mtp(self) -> int | None:
        """MTP layers according to the config, None where it never says."""
        return self.config.count("mtp_num_hidden_layers", 0)

    def mtp(self) -> MtpBlueprint | None:
        self.config.expect("mtp_num_hidden_layers", 0, 1)
        self.config.expect("mtp_use_dedicated_embeddings", False)
        if not self.wants_mtp(self.announced_mtp(), "mtp."):
            return None
        return MtpBlueprint(
            norm_embedding="mtp.pre_fc_norm_embedding.weight",
            norm_hidden="mtp.pre_fc_norm_hidden.weight",
            proj="mtp.fc.weight",
            final_norm="mtp.norm.weight",
            branches=self.block("mtp.layers.0.", True, self.config.count("num_experts", 0) > 0),
        )


def layer_types(config: HfConfig, known: tuple[str, ...], interval_key: str) -> list[str]:
    """Kind of every layer: the list ``layer_types``, or every ``interval_key``-th layer the second of the known kinds."""
    count = config.positive("num_hidden_layers")
    if "layer_types" not in config:
        interval = config.positive(interval_key)
        return [known[(i + 1) % interval == 0] for i in range(count)]
    config.ignore(interval_key)
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise config.fail("layer_types", f"must list {count} layers, each {' or '.join(known)}")
    return kinds
