"""The parity test can fail: each mistake that was made in public, made on purpose, moves the logits far beyond tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from test_parity import PROMPT, TOLERANCE, absorb, case, spoiled_session
from torch import Tensor

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.side_by_side import SideBySide
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.streams import AttentionResiduals, BlockSums
from trtllm_replayssm.network.base import Network, Rope
from trtllm_replayssm.runtime.engine import Engine

#: Change of a layer's weight, given the layer.
WeightChange = Callable[[Layer, Tensor], Tensor]


@dataclass(frozen=True)
class Mistake:
    """layer: kind it is made in. change: of the layers' fields. weight: name behind the layer's, and what becomes of it.

    effect: least change of the logits, in units of their standard deviation.
    """

    name: str
    model: str
    layer: type[Layer]
    change: dict[str, object] | None = None
    weight: tuple[str, WeightChange] | None = None
    effect: float = 0.05

    def __str__(self) -> str:
        return f"{self.name} ({self.model})"


def swapped(first: Callable[[Layer], int], size: Callable[[Layer], int]) -> WeightChange:
    """Two neighbouring blocks of rows, from row ``first``, exchanged."""

    def change(layer: Layer, weight: Tensor) -> Tensor:
        start, count = first(layer), size(layer)
        head, a, b, tail = weight.split([start, count, count, len(weight) - start - 2 * count])
        return torch.cat([head, b, a, tail])

    return change


def regrouped(blocks: Callable[[Layer], tuple[int, ...]]) -> WeightChange:
    """The first rows taken for another order: ``[a, b, c]`` read as ``[b, a, c]`` and so on."""

    def change(layer: Layer, weight: Tensor) -> Tensor:
        count, *shape = blocks(layer)
        return torch.cat([weight[:count].unflatten(0, tuple(shape)).transpose(0, 1).flatten(0, 2), weight[count:]])

    return change


def zero(layer: Layer, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight)


def one(layer: Layer, weight: Tensor) -> Tensor:
    return torch.ones_like(weight)


def log_taken_as_rate(layer: Layer, weight: Tensor) -> Tensor:
    return weight.abs().clamp_min(1e-3).log()


def flipped(layer: Layer, weight: Tensor) -> Tensor:
    return weight.flip(-1)


def plus_one(layer: Layer, weight: Tensor) -> Tensor:
    return weight + 1


def mean_of_head(layer: Layer, weight: Tensor) -> Tensor:
    assert isinstance(layer, Kda)
    return weight.unflatten(0, (layer.num_heads, -1)).mean(1, keepdim=True).expand(-1, layer.head_dim).flatten()


def halves_swapped(layer: Layer, weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, -2)[::-1], -2)


def bc(layer: Mamba2) -> int:
    return layer.n_groups * layer.state_size


def without_scale(index: int) -> tuple[float, ...]:
    """The factors of falcon_h1's projections, one of them forgotten."""
    scales = [1.35, 0.8, 1.2, 0.7, 1.4]
    scales[index] = 1.0
    return tuple(scales)


MISTAKES = (
    Mistake("A_log taken as the rate", "mamba2", Mamba2, weight=("A_log", log_taken_as_rate)),
    Mistake("D dropped", "nemotron_h_dense", Mamba2, weight=("D", zero)),
    Mistake("dt_bias dropped", "nemotron_h_dense", Mamba2, weight=("dt_bias", zero)),
    Mistake("conv bias dropped", "mamba2", Mamba2, weight=("conv1d.bias", zero)),
    Mistake("conv taps reversed", "qwen3_next", GatedDelta, weight=("conv1d.weight", flipped)),
    Mistake(
        "B and C swapped",
        "nemotron_h_moe",
        Mamba2,
        weight=("in_proj.weight", swapped(lambda m: 2 * m.inner_size, bc)),
    ),
    Mistake("dt floor of 1e-2", "nemotron_h_dense", Mamba2, {"dt_min": 1e-2}, effect=0.02),
    Mistake(
        "groups of B and C tiled",
        "mamba2",
        Mamba2,
        weight=(
            "in_proj.weight",
            lambda m, w: torch.cat(
                [
                    w[: 2 * m.inner_size],
                    *(
                        block.unflatten(0, (m.n_groups, -1)).flip(0).flatten(0, 1)
                        for block in w[2 * m.inner_size : -m.num_heads].chunk(2)
                    ),
                    w[-m.num_heads :],
                ]
            ),
        ),
    ),
    Mistake(
        "a and b swapped",
        "qwen3_5_text",
        GatedDelta,
        weight=("in_proj.weight", swapped(lambda g: sum(g.sizes) + g.sizes[2], lambda g: g.num_value_heads)),
    ),
    Mistake(
        "rows of q and k taken per head",
        "qwen3_next",
        GatedDelta,
        weight=(
            "in_proj.weight",
            regrouped(lambda g: (2 * g.sizes[0], 2, g.num_key_heads, g.key_dim)),
        ),
    ),
    Mistake("output norm zero-centred", "qwen3_5_text", GatedDelta, weight=("norm.weight", plus_one)),
    Mistake("output gate a sigmoid", "qwen3_5_text", GatedDelta, {"gate": "sigmoid"}),
    Mistake("beta doubled", "qwen3_next", GatedDelta, {"beta_scale": 2.0}),
    Mistake("q/k norms not zero-centred", "qwen3_5_text", Attention, {"qk_norm_zero_centred": False}),
    Mistake(
        "query and gate rows taken flat",
        "qwen3_next",
        Attention,
        weight=(
            "qkv.weight",
            regrouped(lambda a: (2 * a.sizes[0], 2, a.num_heads, a.head_dim)),
        ),
    ),
    Mistake("RoPE over the full head", "qwen3_5_text", Attention, {"rope": Rope(32, 1e7)}),
    Mistake("RoPE with adjacent pairs", "qwen3_5_text", Attention, {"rope": Rope(8, 1e7, interleaved=True)}),
    Mistake("RoPE in a model without", "nemotron_h_moe", Attention, {"rope": Rope(16, 1e4)}),
    Mistake("kda dt_bias per head", "kimi_linear", Kda, weight=("dt_bias", mean_of_head)),
    Mistake("bounded gate without its bound", "bailing_hybrid", Kda, {"lower_bound": None}),
    Mistake("softplus gate with a bound", "kimi_linear", Kda, {"lower_bound": -5.0}),
    Mistake("latent norm with rms_norm_eps", "kimi_linear", Mla, {"latent_epsilon": 1e-5}),
    Mistake("mla gate dropped", "bailing_hybrid", Mla, {"gate": None}),
    Mistake("mla RoPE dropped", "bailing_hybrid", Mla, {"rope": None}),
    Mistake("mla RoPE over half the channels", "bailing_hybrid", Mla, {"rope": Rope(4, 6e6, True)}),
    Mistake("mla RoPE with half-split pairs", "bailing_hybrid", Mla, {"rope": Rope(8, 6e6)}),
    Mistake("mla RoPE in a model without", "kimi_linear", Mla, {"rope": Rope(8, 1e4, True)}),
    Mistake("swiglu limits of routed experts ignored", "bailing_hybrid_clamp", Moe, {"limit": None}),
    Mistake("routed scaling dropped", "nemotron_h_latent", Moe, {"routed_scale": 1.0}),
    Mistake("chosen weights not normalised", "qwen3_5_moe_text", Moe, {"normalise": False}),
    Mistake("group limit ignored", "bailing_hybrid", Moe, {"n_group": 1}),
    Mistake("router bias dropped", "kimi_linear", Moe, weight=("router.bias", zero)),
    Mistake("shared expert dropped", "nemotron_h_moe", Moe, weight=("shared.down.weight", zero)),
    Mistake("shared expert's gate dropped", "qwen3_next", Moe, {"shared_gate": False}),
    Mistake("gate and up of experts swapped", "qwen3_5_moe_vl", Moe, weight=("experts.up.weight", halves_swapped)),
    Mistake("residual factor of Mamba-2 ignored", "granite4_dense", Mamba2, {"output_scale": 1.0}),
    Mistake("residual factor of attention ignored", "granite4_dense", Attention, {"output_scale": 1.0}),
    Mistake("residual factor of SwiGLU ignored", "granite4_dense", Mlp, {"output_scale": 1.0}),
    Mistake("residual factor of experts ignored", "granite4_moe", Moe, {"output_scale": 1.0}),
    Mistake("attention_multiplier ignored", "granite4_moe", Attention, {"scale": 0.25}),
    Mistake("softmax over all experts", "granite4_moe", Moe, {"normalise": False}),
    Mistake("gate and up of fused rows swapped", "granite4_dense", Mlp, weight=("up.weight", halves_swapped)),
    Mistake("RoPE of a member without Mamba-2 forgotten", "granite4_attention", Attention, {"rope": None}),
    Mistake("RoPE in a member without", "granite4_moe", Attention, {"rope": Rope(16, 1e4)}),
    *(Mistake(f"ssm_multipliers[{i}] ignored", "falcon_h1", Mamba2, {"scales": without_scale(i)}) for i in range(5)),
    Mistake("ssm_in_multiplier ignored", "falcon_h1", Mamba2, {"input_scale": 1.0}),
    Mistake("ssm_out_multiplier ignored", "falcon_h1_norm", Mamba2, {"output_scale": 1.0}),
    Mistake("attention_in_multiplier ignored", "falcon_h1", Attention, {"input_scale": 1.0}),
    Mistake("attention_out_multiplier ignored", "falcon_h1", Attention, {"output_scale": 1.0}),
    Mistake("key_multiplier ignored", "falcon_h1", Attention, {"scale": 0.25}),
    Mistake("mlp_multipliers[0] ignored", "falcon_h1", Mlp, {"gate_scale": 1.0}),
    Mistake("mlp_multipliers[1] ignored", "falcon_h1_norm", Mlp, {"output_scale": 1.0}),
    Mistake("attention beside Mamba-2 lost", "falcon_h1", Attention, weight=("dense.weight", zero)),
    Mistake("RoPE over the full head", "bamba", Attention, {"rope": Rope(16, 1e4)}),
    Mistake("beta not doubled", "olmo_hybrid", GatedDelta, {"beta_scale": 1.0}),
    Mistake("norm in front of attention", "olmo_hybrid", Attention, {"norm_after": False}),
    Mistake("all norms behind their branches", "olmo_hybrid", Mlp, {"norm_after": True}),
    Mistake("RoPE in a model without", "olmo_hybrid", Attention, {"rope": Rope(16, 1e4)}),
    Mistake("RoPE dropped", "olmo_hybrid_rope", Attention, {"rope": None}),
    Mistake("q norm before the heads are told apart", "olmo_hybrid", Attention, weight=("q_norm.weight", flipped)),
    Mistake("window ignored", "lara_mini", Attention, {"window": None}),
    Mistake("window one token longer", "lara_mini", Attention, {"window": 9}),
    Mistake("RoPE over everything, too", "lara_mini", Attention, {"rope": Rope(16, 1e4)}),
    Mistake("RoPE in no layer", "lara_mini", Attention, {"rope": None}),
    Mistake("SiTU taken for SwiGLU in experts", "kimi_k3", Moe, {"activation": "swiglu", "limit": None}),
    Mistake("SiTU taken for SwiGLU in the first layer", "kimi_k3", Mlp, {"activation": "swiglu", "limit": None}),
    Mistake("SiTU's gate unbounded", "kimi_k3", Moe, {"limit": (None, 2.0)}),
    Mistake("SiTU's up unbounded", "kimi_k3", Moe, {"limit": (1.5, None)}),
    Mistake("SiTU's bounds swapped", "kimi_k3", Moe, {"limit": (2.0, 1.5)}),
    Mistake("SiTU clamped", "kimi_k3", Moe, {"activation": "clamped_swiglu"}),
    Mistake("SiTU without a factor taken for SwiGLU", "kimi_k3_text", Moe, {"activation": "swiglu", "limit": None}),
    Mistake("norm of the latent dropped", "kimi_k3", Moe, {"latent_epsilon": None}),
    Mistake("norm of the latent's weight dropped", "kimi_k3", Moe, weight=("latent_norm.weight", one)),
    Mistake("a single expert's weight normalised", "kimi_k3_text", Moe, {"normalise": True}),
    Mistake("group limit ignored", "kimi_k3_text", Moe, {"n_group": 1, "topk_group": 1}),
    # Nothing else scales: the norm of the latent undoes it.
    Mistake("routed scaling dropped", "kimi_k3_text", Moe, {"routed_scale": 1.0}),
    Mistake("mla gate dropped", "kimi_k3", Mla, {"gate": None}),
    Mistake("mla RoPE in a model without", "kimi_k3", Mla, {"rope": Rope(8, 1e4, True)}),
    Mistake("latent norm with rms_norm_eps", "kimi_k3", Mla, {"latent_epsilon": 1e-5}),
    Mistake("norm of the low-rank query dropped", "kimi_k3", Mla, weight=("q_a_norm.weight", one)),
    Mistake("bounded gate without its bound", "kimi_k3", Kda, {"lower_bound": None}),
    Mistake("softplus gate with a bound", "kimi_k3_text", Kda, {"lower_bound": -5.0}),
    Mistake("A_log read from its padding", "kimi_k3", Kda, weight=("A_log", zero)),
    Mistake("output norm zero-centred", "kimi_k3", Kda, weight=("norm.weight", plus_one)),
)


def changed(mistake: Mistake, engine: Engine) -> Engine:
    """The engine with the mistake in every layer of its kind."""
    decoder, weights = engine.decoder, dict(engine.weights)
    found = [(name, layer) for name, layer in decoder.named_parts() if type(layer) is mistake.layer]
    assert found, f"{mistake.model} has no {mistake.layer.kind}"
    if mistake.weight is not None:
        suffix, change = mistake.weight
        for name, layer in found:
            weights[f"{name}.{suffix}"] = change(layer, weights[f"{name}.{suffix}"])
    layers = tuple(mistaken(layer, mistake) for layer in decoder.layers)
    return replace(engine, decoder=replace(decoder, layers=layers), weights=weights)


def mistaken(layer: Layer, mistake: Mistake) -> Layer:
    if isinstance(layer, SideBySide):
        return replace(layer, layers=tuple(mistaken(part, mistake) for part in layer.layers))
    return replace(layer, **(mistake.change or {})) if type(layer) is mistake.layer else layer


def effect(model: str, engine: Engine) -> float:
    """Largest difference from transformers, in units of the logits' standard deviation."""
    c = case(model)
    logits = absorb(spoiled_session(engine), c.ids[:, : 3 * PROMPT])
    return float((logits - c.logits[:, : 3 * PROMPT]).abs().max() / c.logits.std())


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_in_a_layer_are_seen(mistake: Mistake) -> None:
    engine = changed(mistake, case(mistake.model).engine)
    assert effect(mistake.model, engine) > mistake.effect >= 5 * TOLERANCE


@dataclass(frozen=True)
class Late(AttentionResiduals):
    """A block's first branch still belongs to the one before."""

    def opened(self, net: Network, x: Tensor) -> BlockSums:
        return BlockSums((x,), self.block - 1)


@dataclass(frozen=True)
class Normed(AttentionResiduals):
    def mixture(self, net: Network, name: str, sums: tuple[Tensor, ...]) -> Tensor:
        return super().mixture(net, name, tuple(net.rms_norm(value, None, self.norm_epsilon) for value in sums))


@dataclass(frozen=True)
class Unnormed(AttentionResiduals):
    def mixture(self, net: Network, name: str, sums: tuple[Tensor, ...]) -> Tensor:
        values = torch.stack(sums, -2)
        shares = (values @ net.weight(f"{name}.query.weight")[0]).softmax(-1)
        return (shares[..., None] * values).sum(-2)


@dataclass(frozen=True)
class Open(AttentionResiduals):
    def closed(self, net: Network, name: str, streams: BlockSums) -> Tensor:
        return streams.sums[-1]


def decoder_with(**fields: object) -> Callable[[HybridDecoder], HybridDecoder]:
    return lambda decoder: replace(decoder, **fields)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        pytest.param("qwen3_next", decoder_with(norm_zero_centred=False), id="norm weight without plus one"),
        pytest.param("kimi_linear", decoder_with(norm_zero_centred=True), id="plain norm taken as zero-centred"),
        pytest.param("nemotron_h_dense", lambda d: replace(d, layers=d.layers[:-1]), id="last layer lost"),
        pytest.param("kimi_k3", decoder_with(streams=None), id="attention residuals taken for usual ones"),
        pytest.param("kimi_k3", decoder_with(streams=AttentionResiduals(2, 1e-5)), id="blocks counted in branches"),
        pytest.param("kimi_k3", decoder_with(streams=AttentionResiduals(8, 1e-5)), id="blocks twice as long"),
        pytest.param("kimi_k3", decoder_with(streams=Late(4, 1e-5)), id="blocks that end after their first branch"),
        pytest.param("kimi_k3", decoder_with(streams=Normed(4, 1e-5)), id="mixture of normed sums"),
        pytest.param("kimi_k3", decoder_with(streams=Unnormed(4, 1e-5)), id="scores of sums as they are"),
        pytest.param("kimi_k3", decoder_with(streams=Open(4, 1e-5)), id="head reads the last sum alone"),
        *(
            pytest.param(model, decoder_with(**{end: 1.0}), id=f"{end} of {model} ignored")
            for model in ("granite4_dense", "falcon_h1")
            for end in ("embedding_scale", "logits_scale")
        ),
    ],
)
def test_mistakes_in_the_decoder_are_seen(model: str, change: Callable[[HybridDecoder], HybridDecoder]) -> None:
    engine = case(model).engine
    assert effect(model, replace(engine, decoder=change(engine.decoder))) > 0.05
