"""``causal_conv`` by itself: chunks, ring contents and optional parts."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.reference.conv import causal_conv
from trtllm_replayssm.replay import ReplayConfig


def plan(rows: list[tuple[int, int, int]]) -> torch.Tensor:
    """Step info of rows (slot, committed, query_len); folds do not concern a convolution."""
    step = torch.zeros(len(rows), STEP_WORDS, dtype=torch.int32)
    for column, values in zip((Step.SLOT, Step.COMMITTED, Step.QUERY_LEN), zip(*rows)):
        step[:, column] = torch.tensor(values, dtype=torch.int32)
    return step


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_are_one_convolution(dtype: torch.dtype, bias: bool, silu: bool) -> None:
    attributes = CausalConvAttributes(6, 4, 5, silu)
    x, weight = torch.randn(40, 6).to(dtype), torch.randn(6, 4)
    offset = torch.randn(6) if bias else None
    ring = torch.full((3, 5, 6), math.nan, dtype=dtype)
    outputs, done = [], 0
    for size in (1, 2, 1, 4, 5, 6, 11, 1, 9):
        y = causal_conv(attributes, x[None, done : done + size], weight, offset, plan([(1, done, size)]), ring)
        outputs.append(y[0])
        done += size
    assert done == 40
    expected = oracle.conv(x, weight, offset, silu)
    bits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(torch.cat(outputs).double(), expected, atol=bits, rtol=bits)
    assert ring[[0, 2]].isnan().all()


@pytest.mark.parametrize("drafts", range(0, 16, 3))
def test_the_ring_keeps_the_last_tokens_in_their_rows(drafts: int) -> None:
    """Token p lies in row p % conv_rows, whatever chunk brought it."""
    attributes = CausalConvAttributes.create(2, 4, ReplayConfig(window=16, max_draft_len=drafts))
    rows = attributes.conv_rows
    assert rows == 3 + drafts + 1
    x, ring = torch.arange(50.0)[None, :, None].expand(1, 50, 2), torch.full((1, rows, 2), math.nan)
    done = 0
    for size in (1, 30, 2, 17):
        causal_conv(attributes, x[:, done : done + size], torch.ones(2, 4), None, plan([(0, done, size)]), ring)
        done += size
        for p in range(max(0, done - rows), done):
            assert ring[0, p % rows, 0] == p


def test_ragged_rows_write_their_own_tokens_only() -> None:
    attributes = CausalConvAttributes(2, 3, 6)
    x = torch.randn(3, 4, 2)
    x[0, 2:], x[1] = math.nan, math.nan
    ring = torch.zeros(2, 6, 2)
    y = causal_conv(attributes, x, torch.ones(2, 3), None, plan([(1, 4, 2), (-1, 0, 0), (0, 0, 4)]), ring)
    assert y.isfinite().all()
    assert not y[0, 2:].any()
    assert not y[1].any()
    assert torch.equal(ring[1, [4, 5]], x[0, :2])
    assert not ring[1, :4].any()
    assert torch.equal(ring[0, :4], x[2])
