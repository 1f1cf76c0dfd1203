"""``replayssm::advance`` and ``replayssm::causal_conv`` on the GPU."""

from __future__ import annotations

import random

import harness
import pytest
import torch

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS
from trtllm_replayssm.plugins.device import advance as device_advance
from trtllm_replayssm.plugins.device import causal_conv as device_conv
from trtllm_replayssm.plugins.reference import advance as reference_advance
from trtllm_replayssm.plugins.reference import conv as reference_conv

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("tokens", [1, 4, 300])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_advance_equals_reference(tokens, window):
    rng, rows, slots = random.Random(window), 300, 310
    cursors = torch.zeros(slots, CURSOR_WORDS, dtype=torch.int32)
    cursors[:, 1] = torch.tensor([rng.choice([0, rng.randint(0, 9000)]) for _ in range(slots)])
    cursors[:, 0] = cursors[:, 1] + torch.tensor([rng.randint(0, window) for _ in range(slots)])
    slot_ids = torch.tensor(
        [slot if rng.random() < 0.9 else -1 for slot in rng.sample(range(slots), rows)], dtype=torch.int32
    )
    query_lens = torch.tensor([rng.randint(1, tokens) for _ in range(rows)], dtype=torch.int32)
    modes = torch.tensor([rng.randint(0, 2) for _ in range(rows)], dtype=torch.int32)
    attributes, on_gpu = AdvanceAttributes(window), cursors.cuda()
    want = reference_advance.advance(attributes, cursors, slot_ids, query_lens, modes, tokens)
    got = device_advance.advance(attributes, on_gpu, slot_ids.cuda(), query_lens.cuda(), modes.cuda(), tokens)
    assert torch.equal(got.cpu(), want) and torch.equal(on_gpu.cpu(), cursors)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 16, 200])
@pytest.mark.parametrize("kernel,channels,bias", [(4, 6144, True), (4, 70, False), (3, 96, True), (2, 4, True)])
def test_causal_conv(dtype, tokens, kernel, channels, bias):
    run_conv(dtype, tokens, kernel, channels, bias)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_causal_conv_of_channels_that_no_vector_may_start_at(first, tokens, dtype):
    run_conv(dtype, tokens, 4, 64, True, first)


def run_conv(dtype, tokens, kernel, channels, bias, first=0):
    """first: where x begins in its wider tokens."""
    rng, generator, rows = random.Random(tokens), torch.Generator().manual_seed(tokens), 9
    verify = tokens if tokens <= 16 else 1
    attributes = CausalConvAttributes(channels, kernel, kernel - 1 + verify)
    slots = rng.sample(range(rows + 2), rows)
    plans = [
        harness.RowPlan(slot, committed, 0, 0, rng.randint(1, tokens))
        if rng.random() < 0.9
        else harness.RowPlan(-1, 0, 0, 0, 0)
        for slot, committed in zip(slots, [0, 1, 2, 3, 4, 7, 100, 1001, 5003], strict=True)
    ]
    pool = attributes.pools(dtype)["conv_ring"].allocate(rows + 2).fill_(float("nan"))
    for plan in plans:
        for p in range(max(0, plan.committed - kernel + 1), plan.committed):
            pool[plan.slot, p % attributes.conv_rows] = torch.randn(channels, generator=generator).to(dtype)
    wide = harness.poison_padding(torch.randn(rows, tokens, channels + 8, generator=generator).to(dtype), plans)
    weight = torch.randn(channels, kernel, generator=generator).to(dtype)
    shift = torch.randn(channels, generator=generator).to(dtype) if bias else None
    step, x = harness.step_tensor(plans), wide[..., first : first + channels]

    def run_reference(pools):
        shift64 = None if shift is None else shift.double()
        return reference_conv.causal_conv(attributes, x.double(), weight.double(), shift64, step, pools["conv_ring"])

    def run_device(pools):
        parts = (
            wide.cuda()[..., first : first + channels],
            weight.cuda(),
            None if shift is None else shift.cuda(),
            step.cuda(),
        )
        return device_conv.causal_conv(attributes, *parts, pools["conv_ring"])

    harness.compare(run_reference, run_device, {"conv_ring": pool}, {"conv_ring": 0.0})
