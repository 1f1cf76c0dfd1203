"""Kimi-K3: Kimi-Linear with a bounded decay, gated latent attention, SiTU, latent experts and attention residuals.

What each of them computes was taken from public descriptions of the model's remote code, see docs/families.md.
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_replayssm.builders.families.base import Source
from trtllm_replayssm.builders.families.blueprint import Blueprint, Branch, Sources
from trtllm_replayssm.builders.families.config_parts import gate_bound
from trtllm_replayssm.builders.families.kimi_linear import FIXED, LATENT_EPSILON, KimiLinear
from trtllm_replayssm.builders.families.parts import plain
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.streams import AttentionResiduals

#: Keys by which a config of the class KimiLinearForCausalLM is one of K3's text model. A dot leads into a nested object.
MARKERS = (
    *("linear_attn_config.gate_lower_bound", "linear_attn_config.use_full_rank_gate", "attn_res_block_size"),
    *("routed_expert_hidden_size", "mla_use_output_gate", "activation_situ_beta"),
)


class KimiK3(KimiLinear):
    """Tensors ``language_model.model.layers.N.*``, or ``model.layers.N.*`` of the text model alone."""

    architectures = ("KimiK3ForConditionalGeneration",)
    fixed = {key: value for key, value in FIXED.items() if key not in ("hidden_act", "q_lora_rank")}

    def read(self) -> Blueprint:
        self.config.expect("hidden_act", "situ", "silu")
        embedding = self.pick("language_model.model.embed_tokens.weight", "model.embed_tokens.weight")
        self.prefix = embedding.removesuffix("embed_tokens.weight")
        self.residuals = self.read_residuals()
        return super().read()

    def read_residuals(self) -> AttentionResiduals | None:
        """Blocks are counted in layers, of two branches each."""
        if "attn_res_block_size" not in self.config:
            return None
        return AttentionResiduals(
            2 * self.config.positive("attn_res_block_size"), self.config.positive_number("rms_norm_eps")
        )

    def assembled(self, branches: list[Branch]) -> Blueprint:
        config, head = self.config, f"{self.prefix.removesuffix('model.')}lm_head.weight"
        embedding = f"{self.prefix}embed_tokens.weight"
        return Blueprint(
            vocab_size=self.vocabulary(embedding),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=tuple(branches),
            embedding=embedding,
            final_norm=f"{self.prefix}norm.weight",
            head=head,
            tie_embeddings=self.tied(head),
            streams=self.residuals,
            stream_sources=self.query(f"{self.prefix}output_attn_res"),
            dropped=dict.fromkeys(("vision_tower.", "mm_projector."), "vision tower; only the text model is converted"),
        )

    def block(self, prefix: str, kind: str, sparse: bool) -> tuple[Branch, Branch]:
        mixer, ffn = super().block(prefix, kind, sparse)
        sources, heads = mixer.sources, self.kda.num_heads
        if "A_log" in sources:
            # The files have zeros behind the heads.
            sources = sources | {"A_log": Source(sources["A_log"].names, lambda padded: padded.flatten()[:heads])}
        return (
            replace(mixer, sources=sources, streams=self.query(f"{prefix}self_attention_res")),
            replace(ffn, streams=self.query(f"{prefix}mlp_res")),
        )

    def query(self, prefix: str) -> Sources:
        """The norm's weight goes into the query, which is read in float32."""
        if self.residuals is None:
            return {}
        names = (f"{prefix}_norm.weight", f"{prefix}_proj.weight")
        return {"query.weight": Source(names, lambda norm, proj: norm.float() * proj.float())}

    def read_kda(self, section: HfConfig, heads: str, head_dim: str, kernel: str) -> Kda:
        return replace(
            super().read_kda(section, heads, head_dim, kernel),
            lower_bound=gate_bound(section, "gate_lower_bound") if "gate_lower_bound" in section else None,
            full_output_gate=section.flag("use_full_rank_gate", False),
            conv_float32=True,
            norm_float32=True,
        )

    def mla(self) -> Mla:
        rank = self.config.positive("q_lora_rank") if "q_lora_rank" in self.config else None
        gate = self.config.flag("mla_use_output_gate", False)
        q_epsilon = None if rank is None else LATENT_EPSILON
        return replace(super().mla(), q_rank=rank, q_epsilon=q_epsilon, gate="element" if gate else None)

    def mlp(self, width: int) -> Mlp:
        config = self.config
        if config.text("hidden_act") != "situ":
            return super().mlp(width)
        gate, up = "activation_situ_beta", "activation_situ_linear_beta"
        bounds = (
            config.positive_number(gate) if gate in config else 1.0,
            config.positive_number(up) if up in config else None,
        )
        return Mlp(width, "situ", limit=bounds)

    def moe(self) -> Moe:
        config, moe, mlp = self.config, super().moe(), self.mlp(1)
        latent, epsilon = None, None
        normed = config.flag("latent_moe_use_norm", False)
        if "routed_expert_hidden_size" in config:
            latent, epsilon = config.positive("routed_expert_hidden_size"), self.epsilon if normed else None
        return replace(
            moe,
            activation=mlp.activation,
            limit=mlp.limit,
            # The weight of a token's only expert is its score.
            normalise=moe.normalise and moe.top_k > 1,
            latent_size=latent,
            latent_epsilon=epsilon,
        )

    def moe_sources(self, prefix: str, moe: Moe) -> Sources:
        parts = {"latent_in": "down_proj", "latent_out": "up_proj"} if moe.latent_size is not None else {}
        parts |= {"latent_norm": "norm"} if moe.latent_epsilon is not None else {}
        names = {f"{ours}.weight": f"routed_expert_{theirs}.weight" for ours, theirs in parts.items()}
        return super().moe_sources(prefix, moe) | plain(prefix, names)
