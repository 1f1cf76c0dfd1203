"""Residual streams against plain computations of one token, and what they do to a decoder."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.streams import AttentionResiduals, GatedStreams, HyperConnections, SinkhornStreams
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import STEP_WORDS
from trtllm_replayssm.replay import ReplayConfig

HIDDEN = 6
STREAMS: dict[str, HyperConnections] = {
    "sinkhorn": SinkhornStreams(3, 1e-5, 1e-3, 7),
    "sinkhorn of one": SinkhornStreams(1, 1e-5, 1e-6, 2),
    "gated": GatedStreams(4, 1e-6, 5),
}


def drawn(streams: HyperConnections) -> dict[str, Tensor]:
    """Weights of a branch and, as ``final.*``, of the end."""
    random = torch.Generator().manual_seed(3)
    parameters = streams.branch_parameters(HIDDEN)
    parameters |= {f"final.{n}": p for n, p in streams.final_parameters(HIDDEN).items()}
    return {name: torch.randn(p.shape, generator=random) / math.sqrt(p.shape[-1]) for name, p in parameters.items()}


def network(weights: dict[str, Tensor]) -> TorchNetwork:
    return TorchNetwork(weights, {}, torch.zeros(2, STEP_WORDS, dtype=torch.int32), torch.float32, 0)


def rms(x: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def sinkhorn(streams: SinkhornStreams, w: dict[str, Tensor], s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a branch reads of streams ``[n, D]``, the streams after its output y, and what the head reads of them."""
    n, e = streams.count, streams.epsilon
    p = rms(s.flatten(), streams.norm_epsilon) @ w["mix.weight"].T + w["mix.bias"]
    matrix = p[2 * n :].unflatten(0, (n, n)).softmax(1) + e
    for i in range(2 * streams.iterations - 1):
        matrix = matrix / (matrix.sum(i % 2, keepdim=True) + e)
    read = sum((p[i].sigmoid() + e) * s[i] for i in range(n))
    after = [2 * p[n + j].sigmoid() * y + sum(matrix[i, j] * s[i] for i in range(n)) for j in range(n)]
    return read, torch.stack(after), sum(after) / n


def gated(streams: GatedStreams, w: dict[str, Tensor], s: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = streams.count

    def mixture(prefix: str, s: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(s, streams.norm_epsilon) * (1 + w[f"{prefix}norm.weight"].unflatten(0, (n, -1)))
        gate = F.silu(w[f"{prefix}down.weight"] @ normed.flatten() / n)
        gate = (w[f"{prefix}up.weight"] @ gate).sigmoid().unflatten(0, (n, -1))
        return (gate * normed).mean(0), normed

    read, normed = mixture("", s)
    inject = 2 * (w["inject.weight"] @ normed.flatten() / n).sigmoid()
    after = torch.stack([s[i] + inject[i] * y for i in range(n)])
    return read, after, mixture("final.", after)[0]


@pytest.mark.parametrize("name", STREAMS)
def test_a_branch_reads_and_writes_as_its_formula_says(name: str) -> None:
    streams = STREAMS[name]
    weights, random = drawn(streams), torch.Generator().manual_seed(4)
    net = network({f"s.{n}": w for n, w in weights.items()})
    given = torch.randn(2, 3, streams.count * HIDDEN, generator=random)
    output = torch.randn(2, 3, HIDDEN, generator=random)
    read, mixing = streams.read(net, "s", given)
    after = streams.written(net, given, output, mixing)
    closed = streams.closed(net, "s.final", after)
    formula = sinkhorn if isinstance(streams, SinkhornStreams) else gated
    wide = {n: w.double() for n, w in weights.items()}
    for b, t in ((b, t) for b in range(2) for t in range(3)):
        s = given[b, t].double().unflatten(0, (streams.count, -1))
        expected = formula(streams, wide, s, output[b, t].double())
        for got, want in zip((read, after, closed), expected):
            torch.testing.assert_close(got[b, t].double(), want.flatten(), atol=1e-5, rtol=1e-5)


def test_mixing_neither_grows_nor_shrinks_what_it_mixes() -> None:
    """Enough iterations make rows and columns sum to 1."""
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    mixed = network({}).doubly_stochastic(x, 60, 1e-9)
    assert mixed.min() > 0
    for axis in (-1, -2):
        torch.testing.assert_close(mixed.sum(axis), torch.ones(2, 3, 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", STREAMS)
def test_streams_start_as_copies(name: str) -> None:
    streams, x = STREAMS[name], torch.randn(2, 3, HIDDEN)
    opened = streams.opened(network({}), x)
    assert torch.equal(opened.unflatten(-1, (streams.count, HIDDEN)), x[:, :, None].expand(-1, -1, streams.count, -1))


@pytest.mark.parametrize("name", STREAMS)
def test_a_decoder_with_streams_is_described_by_its_config(name: str) -> None:
    ngram = NgramEmbedding(STREAMS[name].count, 8, 2, 1, 7, 9, 1, 0, 2, 8, 1, 4, 4, 2, 1e-6)
    decoder = HybridDecoder(9, HIDDEN, 1e-6, (ngram, Mlp(4, "clamped_swiglu", 0.5)), streams=STREAMS[name])
    assert HybridDecoder.from_dict(decoder.to_dict()) == decoder
    # Norms are where the streams want them; an embedding between them has neither norm nor mixing.
    norms = STREAMS[name].branch_norms
    names = decoder.parameters()
    assert ("transformer.layers.1.norm.weight" in names, "transformer.ln_f.weight" in names) == (norms, norms)
    assert not any(n.startswith(("transformer.layers.0.norm", "transformer.layers.0.streams")) for n in names)
    assert any(n.startswith("transformer.layers.1.streams.") for n in names)


def test_one_stream_that_mixes_nothing_is_the_plain_residual() -> None:
    """Weights 1 for reading and writing: sigmoid(40) is 1 in float32, and so is 2 sigmoid(0)."""
    plain = HybridDecoder(9, HIDDEN, 1e-6, (Mlp(4, "swiglu"), Mlp(5, "relu2")))
    wrapped = replace(plain, streams=SinkhornStreams(1, 1e-6, 0.0, 1))
    random = torch.Generator().manual_seed(2)
    weights = {name: torch.randn(p.shape, generator=random) for name, p in wrapped.parameters().items()}
    for i in range(2):
        weights[f"transformer.layers.{i}.streams.mix.weight"] = torch.zeros(3, HIDDEN)
        weights[f"transformer.layers.{i}.streams.mix.bias"] = torch.tensor([40.0, 0.0, 0.0])
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected, got = (d.forward(network(weights), ids, ReplayConfig()) for d in (plain, wrapped))
    torch.testing.assert_close(got, expected)


def test_layers_between_streams_need_streams() -> None:
    ngram = NgramEmbedding(2, 8, 2, 1, 7, 9, 1, 0, 2, 8, 1, 4, 4, 2, 1e-6)
    with pytest.raises(TypeError, match="ngram layers need residual streams"):
        ngram.forward(network({}), "n", torch.zeros(1, 1, 4), ReplayConfig())


# ---- attention residuals ---------------------------------------------------------------------------------------------

RESIDUALS = AttentionResiduals(block=3, norm_epsilon=1e-3)
#: More than two blocks of branches.
BRANCHES = 8


def mixed(query: Tensor, values: list[Tensor]) -> Tensor:
    """softmax(query . rms(value)) of values ``[D]``, one after the other."""
    scores = torch.stack([rms(value, RESIDUALS.norm_epsilon) @ query for value in values])
    return sum(share * value for share, value in zip(scores.softmax(0), values))


def test_branches_read_mixtures_of_blocks() -> None:
    random = torch.Generator().manual_seed(6)
    queries = torch.randn(BRANCHES + 1, 1, HIDDEN, generator=random)
    net = network({f"{i}.query.weight": query for i, query in enumerate(queries)})
    x, *outputs = torch.randn(BRANCHES + 1, 2, 3, HIDDEN, generator=random)
    streams, read = RESIDUALS.opened(net, x), []
    for i, output in enumerate(outputs):
        read.append(RESIDUALS.read(net, str(i), streams)[0])
        streams = RESIDUALS.written(net, streams, output, None)
    read.append(RESIDUALS.closed(net, str(BRANCHES), streams))
    for b, t in ((b, t) for b in range(2) for t in range(3)):
        for i in range(BRANCHES + 1):
            # The embedding, and what the branches before this one wrote, three to a block.
            starts = range(0, i, RESIDUALS.block)
            blocks = [sum(output[b, t].double() for output in outputs[s : min(s + RESIDUALS.block, i)]) for s in starts]
            expected = mixed(queries[i, 0].double(), [x[b, t].double(), *blocks])
            torch.testing.assert_close(read[i][b, t].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_first_branch_reads_the_embedding_whatever_its_query() -> None:
    x = torch.randn(1, 2, HIDDEN)
    streams = RESIDUALS.opened(network({}), x)
    assert torch.equal(RESIDUALS.read(network({}), "none", streams)[0], x)


def test_a_decoder_with_attention_residuals_is_described_by_its_config() -> None:
    decoder = HybridDecoder(
        9, HIDDEN, 1e-6, (Mlp(4, "situ", (4.0, 25.0)), Mlp(4, "situ", (4.0, None))), streams=RESIDUALS
    )
    assert HybridDecoder.from_dict(decoder.to_dict()) == decoder
    names = decoder.parameters()
    assert {n for n in names if n.endswith("query.weight")} == {
        *("transformer.layers.0.streams.query.weight", "transformer.layers.1.streams.query.weight"),
        "transformer.streams.query.weight",
    }
    assert "transformer.ln_f.weight" in names
    assert "transformer.layers.0.norm.weight" in names


def test_mixtures_are_computed_in_float32() -> None:
    """In bfloat16, scores of norm 30 would be off by 0.1."""
    net = network({"q.query.weight": 30 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))})
    sums = torch.randn(3, 1, 2, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = RESIDUALS.mixture(net, "q", tuple(sums))
    expected = RESIDUALS.mixture(net, "q", tuple(sums.float()))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())
