"""GLM-5.3-Flash (glm5_next): bounded Kimi Delta Attention, indexed latent attention, hyper-connections, clamped MoE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source
from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch, MtpBlueprint, Sources
from trtllm_replayssm.builders.families.config_parts import gate_bound
from trtllm_replayssm.builders.families.parts import (
    kda_sources,
    listed_types,
    mla_sources,
    numbered_mtp,
    plain,
    sigmoid_moe_sources,
    swiglu_sources,
    with_prefix,
)
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.indexer import PooledIndexer
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.streams import SinkhornStreams
from trtllm_replayssm.errors import UnsupportedModelError

#: Epsilon of the layer norm of index keys: a constant of the model's code.
INDEX_EPSILON = 1e-6
#: The published files and transformers have different words for latent attention with an indexer.
INDEXED = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
#: Values that are part of what is implemented.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "mhc": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "moe_layer_freq": 1,
}
#: There is no RoPE to be described. Drafts may share the chosen positions of the first one; here each chooses its own.
IGNORED = (
    *("head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling", "indexer_rope_interleave"),
    *("moe_router_dtype", "index_share_for_mtp_iteration", "max_position_embeddings", "pretraining_tp", "ep_size"),
)
#: Sizes of KDA: in ``linear_attn_config`` as published, and beside it as transformers writes them.
LINEAR = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


class Glm5Next(BlueprintFamily):
    """Tensors ``model.language_model.layers.N.{self_attn, mlp, hc_*}``; the MTP layer follows the last one."""

    architectures = ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM")
    aliases = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}

    def read(self) -> Blueprint:
        config = self.config
        for key, value in FIXED.items():
            config.expect(key, value)
        config.ignore(*IGNORED)
        norm = self.pick("model.language_model.norm.weight", "model.norm.weight")
        self.prefix = norm.removesuffix("norm.weight")
        self.heads, self.epsilon = config.positive("num_attention_heads"), config.positive_number("rms_norm_eps")
        config.expect("num_key_value_heads", self.heads)
        self.count, self.limit = config.positive("num_hidden_layers"), config.positive_number("swiglu_limit")
        self.streams = SinkhornStreams(
            config.positive("hc_mult"),
            self.epsilon,
            config.positive_number("hc_eps"),
            config.positive("hc_sinkhorn_iters"),
        )
        indexed, sparse = self.indexed_layers(), self.sparse_layers()
        self.check_indexers(indexed)
        self.kda, self.mla, self.moe = self.read_kda(indexed), self.read_mla(), self.read_moe()
        branches: list[Branch] = []
        for i in range(self.count):
            branches += self.block(f"{self.prefix}layers.{i}.", indexed[i], sparse[i], streams=True)
        return Blueprint(
            vocab_size=self.vocabulary(f"{self.prefix}embed_tokens.weight"),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=self.epsilon,
            branches=tuple(branches),
            embedding=f"{self.prefix}embed_tokens.weight",
            final_norm=norm,
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            streams=self.streams,
            mtp=self.mtp(),
            dropped=dict.fromkeys(("model.visual.", "visual."), "vision tower; only the text model is converted"),
        )

    # ---- which layer is what -----------------------------------------------------------------------------------------

    def indexed_layers(self) -> list[bool]:
        kinds = listed_types(self.config, "layer_types", ("linear_attention", *INDEXED))
        return [kind in INDEXED for kind in kinds]

    def sparse_layers(self) -> list[bool]:
        config = self.config
        if "mlp_layer_types" not in config:
            return [i >= config.count("first_k_dense_replace") for i in range(self.count)]
        sparse = [kind == "sparse" for kind in listed_types(config, "mlp_layer_types", ("dense", "sparse"))]
        first = sparse.index(True) if True in sparse else self.count
        if config.count("first_k_dense_replace", first) != first:
            raise config.fail("first_k_dense_replace", f"does not fit mlp_layer_types, whose first {first} are dense")
        return sparse

    def check_indexers(self, indexed: list[bool]) -> None:
        """Raises UnsupportedModelError where a layer attends to what an earlier one chose."""
        config, kinds = self.config, []
        config.ignore("index_skip_topk_offset")
        if "indexer_types" in config:
            kinds = listed_types(config, "indexer_types", ("full", "shared"))
            config.ignore("index_topk_freq", "index_topk_pattern")
        else:
            config.expect("index_topk_freq", 1)
            config.expect("index_topk_pattern", None)
        if any(kind == "shared" and here for kind, here in zip(kinds, indexed)):
            raise UnsupportedModelError(
                f"{config.where}: indexer_types has shared indexers, which are not implemented",
                'supported: "full" in every layer',
            )

    # ---- layers ------------------------------------------------------------------------------------------------------

    def read_kda(self, indexed: list[bool]) -> Kda:
        sizes, where = self.config, LINEAR
        if "linear_attn_config" in self.config:
            sizes, where = self.config.section("linear_attn_config"), {key: key for key in LINEAR}
            # Counted from 0, which Kimi-Linear does not.
            for key, here in (("kda_layers", False), ("full_attn_layers", True)):
                numbers = [i for i in range(self.count) if indexed[i] is here]
                if sizes.get(key, numbers) != numbers:
                    raise sizes.fail(key, f"is {sizes.get(key)!r}, but layer_types has these layers at {numbers}")
            sizes.expect("safe_gate", True)
        head_dim = sizes.positive(where["head_dim"])
        kda = Kda(
            num_heads=sizes.positive(where["num_heads"]),
            head_dim=head_dim,
            conv_kernel=sizes.positive(where["short_conv_kernel_size"]),
            norm_epsilon=self.epsilon,
            lower_bound=gate_bound(sizes, where["gate_lower_bound"]),
            gate_rank=head_dim,
            conv_float32=True,
        )
        if sizes is not self.config:
            sizes.finish()
            stated: dict[str, Any] = {"num_heads": kda.num_heads, "head_dim": head_dim}
            stated |= {"short_conv_kernel_size": kda.conv_kernel, "gate_lower_bound": kda.lower_bound}
            for key, value in stated.items():
                self.config.expect(LINEAR[key], value)
        return kda

    def read_mla(self) -> Mla:
        config = self.config
        block, chosen = config.positive("index_kpool"), config.positive("index_topk")
        if chosen % block:
            raise config.fail("index_topk", f"is {chosen}, which is no multiple of {block} index_kpool")
        self.indexer = PooledIndexer(
            num_heads=config.positive("index_n_heads"),
            head_dim=config.positive("index_head_dim"),
            block=block,
            count=chosen // block,
            norm_epsilon=INDEX_EPSILON,
        )
        return Mla(
            num_heads=self.heads,
            kv_rank=config.positive("kv_lora_rank"),
            nope_dim=config.positive("qk_nope_head_dim"),
            rope_dim=0,
            value_dim=config.positive("v_head_dim"),
            latent_epsilon=self.epsilon,
            q_rank=config.positive("q_lora_rank"),
            q_epsilon=self.epsilon,
            indexer=self.indexer,
        )

    def read_moe(self) -> Moe:
        config = self.config
        width, shared = config.positive("moe_intermediate_size"), config.count("n_shared_experts")
        return Moe(
            num_experts=config.positive("n_routed_experts"),
            top_k=config.positive("num_experts_per_tok"),
            intermediate_size=width,
            activation="clamped_swiglu",
            router="sigmoid",
            normalise=config.flag("norm_topk_prob"),
            routed_scale=config.positive_number("routed_scaling_factor"),
            n_group=config.positive("n_group"),
            topk_group=config.positive("topk_group"),
            limit=self.limit,
            shared=Mlp(shared * width, "clamped_swiglu", limit=self.limit) if shared else None,
        )

    def block(self, prefix: str, indexed: bool, sparse: bool, streams: bool) -> tuple[Branch, Branch]:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        if indexed:
            chooser = with_prefix("indexer.", indexer_sources(f"{attention}indexer.", self.indexer))
            mixer: tuple[Layer, Sources] = self.mla, mla_sources(attention, self.mla, "o_proj.weight") | chooser
        else:
            mixer = self.kda, kda_sources(attention, self.kda, "o_proj.weight")
        mixing = [self.stream_sources(f"{prefix}hc_{part}") if streams else {} for part in ("attn", "ffn")]
        names = ("gate_proj", "up_proj", "down_proj")
        if sparse:
            ffn: tuple[Layer, Sources] = self.moe, sigmoid_moe_sources(mlp, self.moe, "e_score_correction_bias", names)
        else:
            dense = Mlp(self.config.positive("intermediate_size"), "clamped_swiglu", limit=self.limit)
            ffn = dense, swiglu_sources(mlp)
        return (
            Branch(f"{prefix}input_layernorm.weight", *mixer, mixing[0]),
            Branch(f"{prefix}post_attention_layernorm.weight", *ffn, mixing[1]),
        )

    def stream_sources(self, prefix: str) -> Sources:
        """The three factors of the mixing's parts go into its rows."""
        sizes = self.streams.sizes

        def scaled(weight: Tensor, scale: Tensor) -> Tensor:
            rows = torch.cat([part.expand(size) for part, size in zip(scale.float().split(1), sizes, strict=True)])
            return weight.float() * rows[:, None]

        return {
            "mix.weight": Source((f"{prefix}_fn", f"{prefix}_scale"), scaled),
            "mix.bias": Source((f"{prefix}_base",)),
        }

    def mtp(self) -> MtpBlueprint | None:
        """One plain block behind the last layer, without hyper-connections."""
        prefix = f"{self.prefix}layers.{self.count}."
        self.config.expect("num_nextn_predict_layers", 0, 1)
        if not self.wants_mtp(self.config.count("num_nextn_predict_layers", 0), prefix):
            return None
        branches = self.block(prefix, indexed=True, sparse=True, streams=False)
        return numbered_mtp(prefix, "shared_head.norm.weight", branches)


def indexer_sources(prefix: str, indexer: PooledIndexer) -> Sources:
    names = {"q": "wq_b", "k": "wk", "head": "weights_proj", "norm": "k_norm"}
    sources = plain(prefix, {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
    sources |= plain(prefix, {"norm.bias": "k_norm.bias", "gate.weight": "index_kpool_compress_gate"})

    def by_channel(position: Tensor) -> Tensor:
        if position.shape != (indexer.block, indexer.head_dim):
            raise ValueError("its parts could not be told apart once they stand behind each other")
        return position.T.flatten()

    position = Source((f"{prefix}index_kpool_compress_ape",), by_channel)
    return sources | {"position.weight": position, "taps.weight": Source((), indexer.delays)}
