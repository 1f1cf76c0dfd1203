"""Nemotron-H: Mamba-2, attention without position embedding, squared-ReLU MLPs and sigmoid MoE, one branch a layer."""

from __future__ import annotations

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, MtpBlueprint, Sources
from trtllm_replayssm.builders.families.mamba2 import TRAINING_KEYS, time_step_limit
from trtllm_replayssm.builders.families.parts import expert_sources, gqa_sources, mamba2_sources, plain, with_prefix
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe

#: Symbols of ``hybrid_override_pattern``, and words of ``layers_block_type`` on the hub and after a save by transformers 5.
KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
}
#: A tensor that only this kind of MTP layer has, behind ``mixer.``.
MARKERS = {"in_proj.weight": "mamba", "q_proj.weight": "attention", "gate.weight": "moe", "up_proj.weight": "mlp"}
#: No computation depends on these: there is no RoPE, and a sharing of streams is no change of the result.
IGNORED = (
    *TRAINING_KEYS,
    "max_position_embeddings",
    "rope_theta",
    "partial_rotary_factor",
    "rope_parameters",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "keep_mtp_spec_in_bf16",
    "mtp_use_repeated_layer",
    "mtp_loss_scaling_factor",
)
#: Sizes that only some kinds of layers read; a model without such layers may still state them.
OPTIONAL = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "mlp_bias", "mlp_hidden_act"),
    *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias", "use_bias"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "n_shared_experts"),
    *("time_step_limit", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
)


class NemotronH(BlueprintFamily):
    """Tensors ``backbone.layers.N.{norm, mixer.*}``; MTP under ``mtp.layers.N``."""

    architectures = ("NemotronHForCausalLM",)
    aliases = {
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
        "norm_eps": "layer_norm_epsilon",
        "rms_norm_eps": "layer_norm_epsilon",
        "num_local_experts": "n_routed_experts",
    }

    def read(self) -> Blueprint:
        config = self.config
        config.expect("mamba_hidden_act", "silu")
        for key in ("attention_bias", "mamba_proj_bias", "sliding_window"):
            config.expect(key, False)
        config.ignore(*IGNORED, *OPTIONAL)
        prefix = self.pick("backbone.norm_f.weight", "model.norm_f.weight").removesuffix("norm_f.weight")
        self.epsilon = config.positive_number("layer_norm_epsilon")
        kinds = self.kinds("hybrid_override_pattern", "layers_block_type")
        stated = config.count("num_hidden_layers", len(kinds))
        if stated != len(kinds):
            raise config.fail("num_hidden_layers", f"is {stated}, but the layer pattern has {len(kinds)} layers")
        embedding = f"{prefix}embeddings.weight"
        return Blueprint(
            vocab_size=self.vocabulary(embedding),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=self.branches(f"{prefix}layers.", kinds),
            embedding=embedding,
            final_norm=f"{prefix}norm_f.weight",
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            residual_float32=config.flag("residual_in_fp32", False),
            mtp=self.mtp(),
        )

    def kinds(self, *keys: str) -> list[str]:
        """Kind of every layer, from a string of symbols or a list of words."""
        key = self.config.first(*keys)
        pattern = self.config.get(key)
        symbols = list(pattern) if isinstance(pattern, str | list) else []
        if not symbols:
            raise self.config.fail(key, f"is {pattern!r}; expected a pattern of layers")
        unknown = [symbol for symbol in symbols if not isinstance(symbol, str) or symbol not in KINDS]
        if unknown:
            raise self.config.fail(key, f"holds {unknown[0]!r}; known are {', '.join(KINDS)}")
        return [KINDS[symbol] for symbol in symbols]

    def branches(self, prefix: str, kinds: list[str]) -> tuple[Branch, ...]:
        made = {kind: getattr(self, kind)() for kind in dict.fromkeys(kinds)}
        return tuple(
            Branch(f"{prefix}{i}.norm.weight", made[kind], mixer_sources(f"{prefix}{i}.mixer.", made[kind]))
            for i, kind in enumerate(kinds)
        )

    # ---- layer kinds -------------------------------------------------------------------------------------------------

    def mamba(self) -> Mamba2:
        config = self.config
        low, high = time_step_limit(config)
        return Mamba2(
            num_heads=config.positive("mamba_num_heads"),
            head_dim=config.positive("mamba_head_dim"),
            state_size=config.positive("ssm_state_size"),
            n_groups=config.positive("n_groups"),
            conv_kernel=config.positive("conv_kernel"),
            norm_epsilon=self.epsilon,
            conv_bias=config.flag("use_conv_bias"),
            proj_bias=config.flag("use_bias", False),
            dt_min=low,
            dt_max=high,
        )

    def attention(self) -> Attention:
        config, head_dim = self.config, self.config.positive("head_dim")
        heads, kv_heads = config.positive("num_attention_heads"), config.positive("num_key_value_heads")
        return Attention(heads, kv_heads, head_dim, head_dim**-0.5)

    def mlp(self) -> Mlp:
        self.config.expect("mlp_hidden_act", "relu2")
        return Mlp(self.config.positive("intermediate_size"), "relu2", bias=self.config.flag("mlp_bias", False))

    def moe(self) -> Moe:
        config = self.config
        config.expect("mlp_hidden_act", "relu2")
        config.expect("mlp_bias", False)
        config.expect("n_shared_experts", 1)
        return Moe(
            num_experts=config.positive("n_routed_experts"),
            top_k=config.positive("num_experts_per_tok"),
            intermediate_size=config.positive("moe_intermediate_size"),
            activation="relu2",
            router="sigmoid",
            normalise=config.flag("norm_topk_prob"),
            routed_scale=config.positive_number("routed_scaling_factor"),
            n_group=config.positive("n_group"),
            topk_group=config.positive("topk_group"),
            shared=Mlp(config.positive("moe_shared_expert_intermediate_size"), "relu2"),
            latent_size=config.positive("moe_latent_size") if "moe_latent_size" in config else None,
        )

    # ---- multi-token prediction --------------------------------------------------------------------------------------

    def mtp(self) -> MtpBlueprint | None:
        """One prediction depth of several branches; the released models use it again for every draft token."""
        depths = self.config.count("num_nextn_predict_layers", 0)
        if not self.wants_mtp(depths, "mtp."):
            return None
        if self.tensor_shapes:
            kinds = self.mtp_kinds_of_tensors()
        else:
            kinds = self.kinds("mtp_hybrid_override_pattern", "mtp_layers_block_type")
        first, last = "mtp.layers.0.", f"mtp.layers.{len(kinds) - 1}."
        return MtpBlueprint(
            norm_embedding=f"{first}enorm.weight",
            norm_hidden=f"{first}hnorm.weight",
            proj=f"{first}eh_proj.weight",
            final_norm=f"{last}final_layernorm.weight",
            branches=self.branches("mtp.layers.", kinds),
        )

    def mtp_kinds_of_tensors(self) -> list[str]:
        """Kinds of the MTP layers by the tensors that they have."""
        kinds: list[str] = []
        while self.holds(f"mtp.layers.{len(kinds)}."):
            mixer = f"mtp.layers.{len(kinds)}.mixer."
            kind = next((kind for name, kind in MARKERS.items() if mixer + name in self.tensor_shapes), None)
            if kind is None:
                raise self.config.fail("num_nextn_predict_layers", f"asks for MTP, but {mixer}* is no known layer")
            kinds.append(kind)
        return kinds


def mixer_sources(prefix: str, layer: Layer) -> Sources:
    if isinstance(layer, Mamba2):
        return mamba2_sources(prefix, layer)
    if isinstance(layer, Attention):
        return gqa_sources(prefix)
    if isinstance(layer, Mlp):
        return mlp_sources(prefix, layer)
    assert isinstance(layer, Moe)
    assert layer.shared is not None
    sources = plain(prefix, {"router.weight": "gate.weight", "router.bias": "gate.e_score_correction_bias"})
    sources |= expert_sources(f"{prefix}experts.", layer.num_experts, ("up_proj",), "down_proj")
    sources |= with_prefix("shared.", mlp_sources(f"{prefix}shared_experts.", layer.shared))
    if layer.latent_size is not None:
        sources |= plain(
            prefix, {"latent_in.weight": "fc1_latent_proj.weight", "latent_out.weight": "fc2_latent_proj.weight"}
        )
    return sources


def mlp_sources(prefix: str, layer: Mlp) -> Sources:
    parts = ("weight", "bias") if layer.bias else ("weight",)
    return plain(prefix, {f"{ours}.{part}": f"{ours}_proj.{part}" for ours in ("up", "down") for part in parts})
