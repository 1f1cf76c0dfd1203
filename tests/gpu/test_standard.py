"""Layers with a window of 1 on the GPU: the ordinary recurrence, without a ring."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import harness
import pytest
import torch
from test_delta_rule import Case as DeltaCase
from test_delta_rule import run_case as run_delta
from test_mamba2 import BF16, FP16, FP32, NANO, make_ring, run_case

from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.device.standard import warp_rows
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

MAMBA2_SHAPES = [NANO, (8, 16, 32, 4), (8, 48, 64, 2), (8, 80, 128, 8), (8, 128, 128, 2), (8, 64, 256, 2)]
DTYPES = [(BF16, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, FP32)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MAMBA2_SHAPES, ids=str)
def test_mamba2(shape, dtypes):
    run_case(shape, 1, 1, dtypes, rows=40)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["gated_delta", "kda", "kda bounded"])
def test_delta_rule(layer, dtypes):
    activation, state = dtypes
    run_delta(DeltaCase(layer, 1, window=1, activation=activation, state=state, rows=40))


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (256, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("layer", ["gated_delta", "kda"])
def test_delta_rule_shapes(layer, dims):
    assert warp_rows((dims[1], dims[0]), FP32)
    run_delta(DeltaCase(layer, 1, dims, window=1, rows=20))


class Step:
    """A step of one token of a Mamba-2 layer with a window of 1, in random slots, some without a checkpoint."""

    def __init__(self, state: torch.dtype, stochastic: bool = False) -> None:
        self.attributes = Mamba2Attributes(*NANO, 1, 1, stochastic_rounding=stochastic)
        plans = harness.random_plans(random.Random(1), 20, 1, 1, 1)
        make = partial(make_ring, torch.Generator().manual_seed(1))
        self.pools = harness.poisoned_pools(self.attributes.pools(BF16, state, BF16), plans, 23, make)
        generator, width = torch.Generator().manual_seed(2), NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2]
        self.inputs = [
            torch.randn(20, 1, width, generator=generator).bfloat16().cuda(),
            torch.randn(20, 1, NANO[0], generator=generator).bfloat16().cuda(),
            *(torch.randn(NANO[0], generator=generator).cuda() for _ in range(3)),
            harness.step_tensor(plans).cuda(),
        ]

    def run(self, symbol: str, gap: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Outputs and pools by the kernel ``symbol``, which takes tokens that lie ``gap`` elements apart."""
        pools, (xbc, *others) = harness.to_device(self.pools), self.inputs
        xbc = torch.nn.functional.pad(xbc, (0, gap))[..., : xbc.shape[-1]]
        strides = (xbc.stride(0), *(8,) * 5)
        record = device.launch_record(self.attributes, BF16, pools["state"].dtype, BF16, len(xbc), 1, strides)
        assert record.kernel.symbol == symbol
        return device.mamba2(self.attributes, xbc, *others, pools), pools


@pytest.mark.parametrize(("state", "stochastic"), [(FP32, False), (BF16, False), (FP16, True)], ids=str)
def test_a_window_of_one_is_the_plain_recurrence(state, stochastic):
    """States and rings to the bit; outputs are sums in another order, and round to the same 16 bits but for a few."""
    step = Step(state, stochastic)
    (y, pools), (want, expected) = step.run("mamba2_standard"), step.run("mamba2_recurrent", gap=4)
    for name, pool in expected.items():
        assert torch.equal(pools[name].nan_to_num(7), pool.nan_to_num(7)), name
    assert (y == want).double().mean() > 0.99
    assert harness.relative_error(y, want) < 1e-4


def test_repeats_are_bit_identical():
    step = Step(FP32)
    first, state = step.run("mamba2_standard")
    for _ in range(50):
        again, pools = step.run("mamba2_standard")
        assert torch.equal(again, first) and torch.equal(pools["state"].nan_to_num(7), state["state"].nan_to_num(7))


def test_drafts_keep_the_ring():
    """With room for drafts a step of one token may have to be taken back: that layer has a ring, whatever its window."""
    attributes = replace(Step(FP32).attributes, ring_rows=5)
    assert device.launch_record(attributes, BF16, FP32, BF16, 1, 1, (0,) * 6).kernel.symbol == "mamba2_single"
