"""Tensor parallelism: the networks of two ranks together equal one rank, and a TensorRT without collectives is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import Emission, Run, make_weights, rtx, without
from torch import Tensor

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.cursors import RowMode

RANKS = 2
#: An odd vocabulary: the ranks' halves of the head are padded.
DECODER = HybridDecoder(
    51,
    32,
    1e-5,
    (
        Mamba2(4, 8, 16, 2, 4, 1e-5, proj_bias=True),
        Mamba2(4, 8, 16, 1, 4, 1e-3),
        Attention(4, 2, 8, 0.3, output_gate=True, bias=True),
        Attention(4, 2, 8, 0.3, qk_norm_epsilon=1e-3, qk_norm_joint=True),
        GatedDelta(2, 4, 8, 8, 4, 1e-6),
        Mla(4, 16, 8, 8, 8, 1e-6),
        Mlp(24, "swiglu", bias=True),
        Moe(4, 2, 12, "swiglu", "softmax", shared=Mlp(12, "swiglu"), shared_gate=True),
    ),
)


def shards(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What the converter writes for one rank."""
    cut = {}
    for name, parameter in DECODER.parameters(RANKS).items():
        whole = weights[name]
        padding = parameter.shape[0] - whole.shape[0]
        whole = torch.nn.functional.pad(whole, (0, 0, 0, padding)) if padding else whole
        cut[name] = parameter.shard(whole, rank, RANKS).contiguous()
    return cut


def emit(rank: int, weights: dict[str, Tensor], **changes: Any) -> Emission:
    return Emission.of(DECODER.divided(RANKS), weights=shards(weights, rank), tp_size=RANKS, **changes)


def test_two_ranks_equal_one() -> None:
    weights = make_weights(DECODER, torch.float32)
    ids = torch.randint(0, 51, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, _ = Run(Emission.of(DECODER, weights=weights), 2).compare(ids, RowMode.ABSORB, 9)
    barrier, parts = threading.Barrier(RANKS, timeout=60), [torch.empty(0)] * RANKS

    def run(rank: int) -> Tensor:
        def exchange(mine: Tensor) -> list[Tensor]:
            parts[rank] = mine
            barrier.wait()
            everyone = list(parts)
            barrier.wait()
            return everyone

        run = Run(emit(rank, weights), 2)
        return run.by_network(ids, run.plan(ids, RowMode.ABSORB), exchange)

    with ThreadPoolExecutor(RANKS) as pool:
        for logits in pool.map(run, range(RANKS)):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_collectives_are_refused_where_there_are_none() -> None:
    weights = make_weights(DECODER, torch.float32)
    with pytest.raises(EngineError, match="cannot sum over 2 ranks") as error:
        emit(0, weights, tensorrt=without(rtx(), collective=False))
    assert "--engine_flavour embedded" in error.value.hint
