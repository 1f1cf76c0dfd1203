"""The parity test sees mistakes in residual streams, indexers, clamped experts and n-grams, too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_mutations import Mistake, changed, effect, flipped, zero
from test_parity import TOLERANCE, case
from torch import Tensor

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.indexer import MeanIndexer, PooledIndexer
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.streams import GatedStreams, SinkhornStreams, Streams
from trtllm_replayssm.network.base import Network, Rope
from trtllm_replayssm.replay import ReplayConfig

POOLED, MEAN = PooledIndexer(12, 16, 4, 4, 1e-6), MeanIndexer(12, 16, 4, 4, 1e-6, Rope(8, 1e7))


@dataclass(frozen=True)
class PastBlocksOnly(PooledIndexer):
    """A token sees the end of an incomplete block through its mean alone: the block before counts as the last one."""

    def selected(self, net: Network, name: str, x: Tensor, query: Tensor, replay: ReplayConfig) -> Tensor | None:
        seen = super().selected(net, name, x, query, replay)
        assert seen is not None
        keys = torch.arange(seen.shape[-1])
        own = torch.arange(seen.shape[1])[:, None] // self.block * self.block
        return seen & ((keys < own) | (keys[None] == torch.arange(seen.shape[1])[:, None]))


@dataclass(frozen=True)
class RotatedToTheirEnd(MeanIndexer):
    """Keys of blocks at the position of their last token."""

    def selected(self, net: Network, name: str, x: Tensor, query: Tensor, replay: ReplayConfig) -> Tensor | None:
        return super().selected(
            Altered(net, rope=lambda x, rope: net.rope(x, replace(rope, shift=0))), name, x, query, replay
        )


class Altered:
    """A network of which some ops are others."""

    def __init__(self, net: Network, **ops: Any) -> None:
        self.net = net
        self.__dict__ |= ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


def absolute(layer: Layer, weight: Tensor) -> Tensor:
    return weight.abs()


def close_together(layer: Layer, weight: Tensor) -> Tensor:
    assert isinstance(layer, NgramEmbedding)
    taps = torch.zeros_like(weight)
    taps[:, -layer.conv_kernel :] = weight[:, :: layer.ngram_size]
    return taps


MISTAKES = (
    Mistake("attention to everything", "glm5_next", Mla, {"indexer": None}),
    Mistake("attention to everything", "qwen4_exp_text", Attention, {"indexer": None}),
    Mistake("one block less", "glm5_next", Mla, {"indexer": replace(POOLED, count=3)}),
    Mistake("one block less", "qwen4_exp_text", Attention, {"indexer": replace(MEAN, count=3)}),
    Mistake("tokens of the open block left out", "glm5_next", Mla, {"indexer": PastBlocksOnly(12, 16, 4, 4, 1e-6)}),
    Mistake("positions in a block dropped", "glm5_next", Mla, weight=("indexer.position.weight", zero)),
    Mistake("blocks by their plain mean", "glm5_next", Mla, weight=("indexer.gate.weight", zero)),
    Mistake("bias of the key norm dropped", "glm5_next", Mla, weight=("indexer.norm.bias", zero)),
    Mistake("weights of index heads taken as positive", "glm5_next", Mla, weight=("indexer.head.weight", absolute)),
    Mistake("tokens of a block in reverse", "glm5_next", Mla, weight=("indexer.taps.weight", flipped)),
    Mistake("index norms not zero-centred", "qwen4_exp_text", Attention, weight=("indexer.q_norm.weight", zero)),
    Mistake(
        "block keys rotated to their end",
        "qwen4_exp_text",
        Attention,
        {"indexer": RotatedToTheirEnd(12, 16, 4, 4, 1e-6, Rope(8, 1e7))},
    ),
    Mistake("latent norms with another epsilon", "glm5_next", Mla, {"latent_epsilon": 1e-6}, effect=0.01),
    Mistake("gate clamped behind silu", "glm5_next", Moe, {"activation": "swiglu"}),
    Mistake("gate clamped behind silu", "glm5_next", Mlp, {"activation": "swiglu"}),
    Mistake("experts not clamped", "glm5_next", Moe, {"limit": None}),
    Mistake("output gate a silu", "qwen4_exp_text", GatedDelta, {"gate": "silu"}),
    Mistake("convolution of n-grams not dilated", "qwen4_exp_text", NgramEmbedding, weight=("conv1d.weight", close_together)),
    Mistake("n-grams hashed with another seed", "qwen4_exp_text", NgramEmbedding, {"seed": 1235}),
    Mistake("text before the start is token 0", "qwen4_exp_text", NgramEmbedding, {"end_token": 0}),
    Mistake("all embeddings hashed alike", "qwen4_exp_vl", NgramEmbedding, {"index": 0}),
    Mistake("streams let n-grams in without their norm", "qwen4_exp_text", NgramEmbedding, weight=("query_norm.weight", zero)),
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes_in_a_layer_are_seen(mistake: Mistake) -> None:
    engine = changed(mistake, case(mistake.model).engine)
    assert effect(mistake.model, engine) > mistake.effect >= 5 * TOLERANCE


class Turned(SinkhornStreams):
    """Streams mixed by the transposed matrix."""

    def written(self, net: Network, streams: Tensor, output: Tensor, mixing: Any) -> Tensor:
        after, across = mixing
        return super().written(net, streams, output, (after, across.transpose(-1, -2)))


class Halved(SinkhornStreams):
    """Outputs written with sigmoids, not twice that."""

    def written(self, net: Network, streams: Tensor, output: Tensor, mixing: Any) -> Tensor:
        after, across = mixing
        return super().written(net, streams, output, (after / 2, across))


class First(SinkhornStreams):
    """A head that reads one stream."""

    def closed(self, net: Network, name: str, streams: Tensor) -> Tensor:
        return self.apart(net, streams)[..., 0, :]


class NormedAsOne(GatedStreams):
    """One norm over all streams together."""

    def mixture(self, net: Network, name: str, streams: Any) -> tuple[Tensor, Tensor]:
        alike: Any = Altered(net, rms_norm=lambda *arguments, groups: net.rms_norm(*arguments))
        return super().mixture(alike, name, streams)


class HalfInjected(GatedStreams):
    def written(self, net: Network, streams: Any, output: Tensor, mixing: Any) -> Any:
        return super().written(net, streams, output, mixing / 2)


class Summed(GatedStreams):
    def mean(self, net: Network, streams: Tensor) -> Tensor:
        return super().mean(net, streams) * self.count


SINKHORN, GATED = (2, 1e-5, 1e-6, 5), (2, 1e-6, 8)


@pytest.mark.parametrize(
    ("model", "streams"),
    [
        pytest.param("glm5_next", Turned(*SINKHORN), id="mixing matrix transposed"),
        pytest.param("glm5_next", Halved(*SINKHORN), id="outputs not doubled"),
        pytest.param("glm5_next", First(*SINKHORN), id="head reads the first stream"),
        pytest.param("glm5_next", SinkhornStreams(2, 1e-5, 1e-6, 1), id="one iteration of Sinkhorn"),
        pytest.param("qwen4_exp_text", NormedAsOne(*GATED), id="one norm for all streams"),
        pytest.param("qwen4_exp_text", HalfInjected(*GATED), id="injection not doubled"),
        pytest.param("qwen4_exp_text", Summed(*GATED), id="mixture summed"),
    ],
)
def test_mistakes_in_the_streams_are_seen(model: str, streams: Streams) -> None:
    engine = case(model).engine
    right = engine.decoder.streams
    # Nothing but the mistake differs.
    assert right is not None
    assert type(right).__name__ in {base.__name__ for base in type(streams).__mro__}
    assert effect(model, replace(engine, decoder=replace(engine.decoder, streams=streams))) > 0.05
