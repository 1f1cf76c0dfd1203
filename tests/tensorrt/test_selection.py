"""Residual streams, chosen blocks and hashed n-grams: the network computes what torch computes, beyond what all tokens see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import Emission, Run, make_weights, rtx, without
from test_emission import check

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.indexer import MeanIndexer, PooledIndexer
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.streams import AttentionResiduals, GatedStreams, SinkhornStreams
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.plugins.cursors import RowMode

HIDDEN, VOCAB, END = 32, 50, 3
ROPE = Rope(8, 1e4)
POOLED = Mla(4, 32, 8, 0, 8, 1e-6, 12, 1e-6, indexer=PooledIndexer(8, 8, 4, 3, 1e-6))
MEAN = Attention(4, 2, 8, 0.3, ROPE, indexer=MeanIndexer(8, 16, 3, 4, 1e-6, ROPE))
DECODERS = {
    "pooled keys, hyper-connections": HybridDecoder(
        VOCAB, HIDDEN, 1e-5, (POOLED, Mlp(24, "clamped_swiglu", 0.2)), streams=SinkhornStreams(3, 1e-5, 1e-6, 6)
    ),
    "mean keys, gated streams, n-grams": HybridDecoder(
        VOCAB,
        HIDDEN,
        1e-6,
        (
            NgramEmbedding(2, 2 * HIDDEN, 3, 2, 61, VOCAB, 7, 0, END, 280, 4, 8, 8, 4, 1e-6),
            MEAN,
            NgramEmbedding(2, 2 * HIDDEN, 2, 1, 17, VOCAB, 7, 1, END, 24, 1, 8, 8, 3, 1e-6),
            Mlp(24, "swiglu"),
        ),
        streams=GatedStreams(2, 1e-6, 6),
    ),
    # Blocks of two branches, of which the last one is not whole.
    "attention residuals": HybridDecoder(
        VOCAB,
        HIDDEN,
        1e-5,
        (
            POOLED,
            Mlp(24, "situ", (0.4, 0.3)),
            Mlp(16, "swiglu"),
            Mlp(8, "relu2"),
            Mlp(8, "swiglu"),
        ),
        streams=AttentionResiduals(2, 1e-5),
    ),
    "pooled keys and RoPE, plain residual": HybridDecoder(
        VOCAB, HIDDEN, 1e-5, (replace(POOLED, rope_dim=8, rope=ROPE), replace(MEAN, rope=None))
    ),
}
every_decoder = pytest.mark.parametrize("name", DECODERS)


def emission(name: str, **options) -> Emission:
    """Taps of indexers are constants, not weights that may be anything."""
    decoder = DECODERS[name]
    weights = make_weights(decoder, torch.float32)
    for prefix, layer in decoder.named_parts():
        match getattr(layer, "indexer", None):
            case PooledIndexer() as indexer:
                weights[f"{prefix}.indexer.taps.weight"] = indexer.delays()
            case MeanIndexer() as indexer:
                weights[f"{prefix}.indexer.taps.weight"] = indexer.mean()
    return Emission.of(decoder, weights=weights, **options)


def tokens(rows: int, count: int, seed: int) -> torch.Tensor:
    """With ends of texts among them."""
    ids = torch.randint(0, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))
    return torch.where(ids % 6 == 0, END, ids)


@every_decoder
def test_network_equals_torch(name: str) -> None:
    """A prefill in two chunks, decoding, and verifying with rejected drafts, with more blocks than are chosen."""
    run = Run(emission(name), 2)
    check(run, ids=tokens(2, 31, 1), mode=RowMode.ABSORB, accepted=31)
    check(run, ids=tokens(2, 6, 2), mode=RowMode.ABSORB, accepted=6)
    for seed, (count, accepted) in enumerate(((1, 1), (4, 2), (4, 1), (1, 1), (4, 4), (4, 3), (1, 1), (4, 4))):
        check(run, ids=tokens(2, count, 10 + seed), mode=RowMode.DECODE, accepted=accepted)


@pytest.mark.parametrize("name", [name for name in DECODERS if "keys" in name])
def test_blocks_make_a_difference(name: str) -> None:
    """The comparison above has something to see: attending to everything gives other logits."""
    sparse = emission(name)

    def everything(layer: Layer) -> Layer:
        indexer = getattr(layer, "indexer", None)
        return layer if indexer is None else replace(layer, indexer=replace(indexer, count=64))

    dense = replace(sparse.decoder, layers=tuple(map(everything, sparse.decoder.layers)))
    ids, results = tokens(1, 40, 1), []
    for decoder in (sparse.decoder, dense):
        run = Run(replace(sparse, decoder=decoder), 1)
        results.append(run.by_torch(ids, run.plan(ids, RowMode.ABSORB)))
    assert (results[0] - results[1]).abs().max() > 1e-2
    torch.testing.assert_close(results[0][:, :8], results[1][:, :8])


@every_decoder
def test_padding_rows_and_tokens_change_nothing(name: str) -> None:
    """Rows that sit a step out keep what a request can still read of their caches, block keys and tokens among them."""
    run = Run(emission(name), 3)
    check(run, ids=tokens(3, 30, 1), mode=RowMode.ABSORB, accepted=30)
    before = {pool: tensor[1].clone() for pool, tensor in run.theirs.items()}
    lengths = [4, 1, 2]
    check(run, [0, 2], lengths, ids=tokens(3, 4, 2), mode=RowMode.DECODE, accepted=1, slots=[0, -1, 2], lengths=lengths)
    for pool, tensor in run.theirs.items():
        held = slice(0, 30 // run.pools[pool].block)
        now, was = (t[:, held] if "cache" in pool else t for t in (tensor[1], before[pool]))
        assert torch.equal(now, was), pool
    check(run, ids=tokens(3, 1, 3), mode=RowMode.DECODE, accepted=1)


@every_decoder
def test_versions_without_cache_layers_equal_torch(name: str) -> None:
    run = Run(emission(name, tensorrt=without(rtx(), kv_cache_update=False)), 2)
    check(run, ids=tokens(2, 31, 1), mode=RowMode.ABSORB, accepted=31)
    check(run, ids=tokens(2, 4, 2), mode=RowMode.DECODE, accepted=3)


@every_decoder
def test_tensorrt_builds_the_network(name: str) -> None:
    assert len(emission(name).plan(StepSizes(max_batch_size=4, verify_tokens=4, prefill_tokens=64))) > 0
