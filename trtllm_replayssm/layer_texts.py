"""The sizes of a layer in a few words, for tables."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.indexer import Indexer
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.layers.side_by_side import SideBySide
from trtllm_replayssm.network.gated import Limit, apart


def layer_text(layer: Layer) -> str:
    """The sizes of a layer in a few words."""
    return " ".join(part for part in DESCRIPTIONS[type(layer)](layer) if part)


def describe_mlp(layer: Any) -> tuple[str, ...]:
    return (f"{layer.intermediate_size}", layer.activation, describe_limit(layer.limit))


def describe_limit(limit: Limit) -> str:
    bounds = dict.fromkeys(f"{bound:g}" for bound in apart(limit) if bound is not None)
    return f"limit {' and '.join(bounds)}" if bounds else ""


def describe_moe(layer: Any) -> tuple[str, ...]:
    return (
        f"{layer.num_experts} experts, top {layer.top_k}, {layer.intermediate_size} {layer.activation}, {layer.router}",
        f"latent {layer.latent_size}" if layer.latent_size else "",
        "normed" if layer.latent_epsilon is not None else "",
        describe_limit(layer.limit),
        f"+ shared {layer_text(layer.shared)}" if layer.shared else "",
    )


def describe_attention(layer: Any) -> tuple[str, ...]:
    return (
        f"{layer.num_heads}/{layer.num_kv_heads} heads x {layer.head_dim}",
        f"rope {layer.rope.dim}" if layer.rope else "no rope",
        "gated" if layer.output_gate else "",
        f"window {layer.window}" if layer.window else "",
        describe_indexer(layer.indexer),
    )


def describe_mla(layer: Any) -> tuple[str, ...]:
    return (
        f"{layer.num_heads} heads x ({layer.nope_dim}+{layer.rope_dim}), latent {layer.kv_rank}, v {layer.value_dim}",
        f"q rank {layer.q_rank}" if layer.q_rank else "",
        "rope" if layer.rope else "no rope",
        f"gated per {layer.gate}" if layer.gate else "",
        describe_indexer(layer.indexer),
    )


def describe_indexer(indexer: Indexer | None) -> str:
    return "" if indexer is None else f"top {indexer.count} of blocks of {indexer.block}"


DESCRIPTIONS: dict[type[Layer], Any] = {
    Mamba2: lambda m: (
        f"{m.num_heads} heads x {m.head_dim}, state {m.state_size}, {m.n_groups} groups, conv {m.conv_kernel}",
    ),
    GatedDelta: lambda m: (
        f"{m.num_key_heads} k heads x {m.key_dim}, {m.num_value_heads} v heads x {m.value_dim}, conv {m.conv_kernel}",
    ),
    Kda: lambda m: (
        f"{m.num_heads} heads x {m.head_dim}, conv {m.conv_kernel},",
        "softplus gate" if m.lower_bound is None else f"gate above {m.lower_bound:g}",
    ),
    NgramEmbedding: lambda n: (
        f"{len(n.hash.primes)} tables x {n.full_width}, {n.rows} rows, n up to {n.ngram_size}, conv {n.conv_kernel}",
    ),
    SideBySide: lambda s: (" + ".join(f"{layer.kind} {layer_text(layer)}" for layer in s.layers),),
    Attention: describe_attention,
    Mla: describe_mla,
    Mlp: describe_mlp,
    Moe: describe_moe,
}
