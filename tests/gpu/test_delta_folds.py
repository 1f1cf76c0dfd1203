"""Delta-rule layers with a read copy: checkpoint and rings have the bits of those of a layer without one."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import harness
import pytest
import torch
from test_delta_rule import LAYERS, Case, make_entry

from trtllm_replayssm.plugins.device import gated_delta as device_gated_delta
from trtllm_replayssm.plugins.device import kda as device_kda
from trtllm_replayssm.plugins.read_copy import FORMATS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def check_bits(case: Case) -> None:
    """One step of rows of every kind, with the copy and without it."""
    attributes, (key_dim, value_dim), (key_heads, value_heads) = case.attributes, case.dims, case.heads
    generator = torch.Generator().manual_seed(case.seed)
    plans = harness.random_plans(random.Random(case.seed), case.rows, case.tokens, case.window, attributes.ring_rows)
    described = attributes.pools(case.activation, case.state, case.ring or case.activation)
    pools = harness.poisoned_pools(described, plans, case.rows + 3, partial(make_entry, generator, case.decay))
    is_gated_delta = case.layer == "gated_delta"
    gates = value_heads * (1 if is_gated_delta else key_dim)
    widths = (
        2 * (key_heads if is_gated_delta else value_heads) * key_dim + value_heads * value_dim,
        gates,
        value_heads,
    )
    inputs = [torch.randn(case.rows, case.tokens, n, generator=generator).to(case.activation).cuda() for n in widths]
    A_log, dt_bias = torch.rand(value_heads, generator=generator).cuda(), torch.zeros(gates, device="cuda")
    device = device_gated_delta.gated_delta if is_gated_delta else device_kda.kda
    left = []
    for read in ("same", case.read):
        bound = {name: pool for name, pool in pools.items() if read != "same" or not harness.is_copy(name)}
        moved = harness.to_device(bound)
        layer = replace(case, read=read).attributes
        device(layer, *inputs, A_log, dt_bias, harness.step_tensor(plans).cuda(), moved)
        left.append({name: pool.cpu().view(torch.uint8) for name, pool in moved.items()})
    assert any(plan.folded and plan.fold_to > plan.folded for plan in plans)
    for name, plain in left[0].items():
        assert torch.equal(plain, left[1][name]), name


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_folds_of_dtypes(layer, tokens, dtypes, read):
    activation, state = dtypes
    check_bits(Case(layer, tokens, draft=tokens - 1, activation=activation, state=state, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("window", [4, 16, 32])
@pytest.mark.parametrize("dims", [(64, 48), (128, 96), (128, 256), (192, 64)], ids=str)
def test_folds_of_shapes(dims, window, read):
    for tokens in (1, 4):
        check_bits(Case("gated_delta", tokens, dims, draft=tokens - 1, window=window, read=read))
