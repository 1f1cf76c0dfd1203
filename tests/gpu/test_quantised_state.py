"""``replayssm::mamba2`` and ``replayssm::materialise`` with 8-bit states on the GPU, against float64 over the stored values."""

from __future__ import annotations

import random
from functools import partial

import harness
import pytest
import torch
from torch import Tensor

from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.device.materialise import materialise as materialise_on_device
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.quantised_state import LARGEST, SCALE
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence, mamba2
from trtllm_replayssm.plugins.reference.materialise import materialise
from trtllm_replayssm.plugins.reference.quantised_state import dequantise, quantise

DEVICE = "cuda"
BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
SHAPES = {
    "nano": Mamba2Attributes(16, 64, 128, 2, 16, 20),
    "wide": Mamba2Attributes(4, 64, 256, 2, 16, 20),
    "long": Mamba2Attributes(4, 32, 64, 4, 64, 80),
    "odd": Mamba2Attributes(3, 24, 40, 3, 16, 16, dt_min=0.02, dt_max=0.4),
}
#: Of new states before they are rounded: decays are exponentials of sums of up to 64 logarithms, and sums may cancel.
RTOL, ATOL = 1e-4, 2e-6
FORMATS = pytest.mark.parametrize("state", [INT8, FP8], ids=["int8", "fp8"])


def make(generator: torch.Generator, state: torch.dtype, name: str, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if name == "state":
        return (x * 40).clamp(-LARGEST[state], LARGEST[state])
    return {SCALE: 0.01 * x.abs(), "ring_dt": 0.3 * x.abs()}.get(name, x)


def pools_of(
    a: Mamba2Attributes, state: torch.dtype, ring: torch.dtype, plans: list[harness.RowPlan], seed: int
) -> dict[str, Tensor]:
    """On the CPU; what must not be read is no number, codes by their scales."""
    generator = torch.Generator().manual_seed(seed)
    described = {name: pool for name, pool in a.pools(ring, state, ring).items() if name != "state"}
    pools = harness.poisoned_pools(described, plans, 8, partial(make, generator, state))
    pools["state"] = a.pools(ring, state, ring)["state"].allocate(8)
    codes = make(generator, state, "state", tuple(pools["state"].shape)).to(state)
    pools["state"].view(INT8).copy_(codes.view(INT8))
    return pools


def widened(pools: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float64, with the values of the stored state."""
    values = dequantise(pools["state"], pools[SCALE]).double()
    return {name: pool.double() for name, pool in pools.items() if name not in ("state", SCALE)} | {"state": values}


def check_states(before: dict[str, Tensor], after: dict[str, Tensor], exact: Tensor, written: list[int]) -> None:
    """Written slots hold the nearest codes under their own scales, all others the bits that they had."""
    dtype = before["state"].dtype
    for slot in range(len(exact)):
        bits = [pools["state"][slot].view(INT8) for pools in (before, after)]
        if slot not in written:
            assert torch.equal(*bits)
            assert torch.equal(*(pools[SCALE][slot].view(torch.int32) for pools in (before, after)))
            continue
        scale = exact[slot].abs().amax(-1) / LARGEST[dtype]
        torch.testing.assert_close(after[SCALE][slot].double(), scale, rtol=RTOL, atol=0)
        codes, wanted = after["state"][slot].double(), exact[slot] / scale[..., None]
        # Half of the distance of two codes: 1 for integers, an eighth of a power of two for E4M3, and of 2^-6 below it.
        step = 1.0 if dtype == INT8 else 2.0 ** wanted.abs().clamp(min=2.0**-6).log2().floor() / 8
        assert ((codes - wanted).abs() <= 0.5 * step + RTOL * wanted.abs() + ATOL * LARGEST[dtype]).all()


@FORMATS
@pytest.mark.parametrize("activation", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 4, 16, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_steps(name: str, tokens: int, activation: torch.dtype, state: torch.dtype) -> None:
    a, rng = SHAPES[name], random.Random(tokens)
    ring_rows = a.ring_rows if tokens <= a.ring_rows - a.window else a.window
    if ring_rows == a.window and 1 < tokens <= 16:
        pytest.skip("this ring has no room for drafts")
    plans = harness.random_plans(rng, 5, tokens, a.window, ring_rows)
    if tokens > 16:
        plans = [absorbing(plan) for plan in plans]
    generator = torch.Generator().manual_seed(tokens)
    pools = pools_of(a, state, activation, plans, tokens)
    inner, groups = a.num_heads * a.head_dim, a.n_groups * a.state_size
    xbc, dt = (
        harness.poison_padding(torch.randn(5, tokens, width, generator=generator).to(activation), plans)
        for width in (inner + 2 * groups, a.num_heads)
    )
    A_log, dt_bias, D = (torch.randn(a.num_heads, generator=generator) for _ in range(3))
    weights, step = (A_log, dt_bias - 2, D), harness.step_tensor(plans)
    exact = widened(pools)
    expected = mamba2(a, xbc.double(), dt.double(), *(w.double() for w in weights), step, exact)
    results = []
    for _ in range(2):
        moved = harness.to_device(pools)
        inputs = (x.to(DEVICE) for x in (xbc, dt, *weights, step))
        y = device.mamba2(a, *inputs, moved)
        results.append((y.cpu(), {key: pool.cpu() for key, pool in moved.items()}))
    (y, after), (again, repeated) = results
    assert torch.equal(y, again) and all(torch.equal(*map(bits, (after[n], repeated[n]))) for n in after)
    assert harness.relative_error(y, expected) < harness.TOLERANCE[activation]
    for key in ("ring_x", "ring_b", "ring_dt"):
        assert harness.relative_error(after[key], exact[key]) < 1e-6, key
    written = [plan.slot for plan in plans if plan.slot >= 0 and plan.fold_to > plan.folded]
    check_states(pools, after, exact["state"], written)


def absorbing(plan: harness.RowPlan) -> harness.RowPlan:
    return harness.RowPlan(plan.slot, plan.committed, plan.folded, plan.committed + plan.query_len, plan.query_len)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@FORMATS
@pytest.mark.parametrize("history", [0, 1, 16])
def test_a_prefix_in_another_slot(history: int, state: torch.dtype) -> None:
    a, plans = SHAPES["nano"], [harness.RowPlan(3, 500 + history, 500, 500, 0)]
    pools = pools_of(a, state, BF16, plans, history)
    A_log = torch.randn(a.num_heads, generator=torch.Generator().manual_seed(0))
    exact = widened(pools)
    materialise(Mamba2Recurrence(A_log.double(), A_log.double()), exact, 3, 1, 500, 500 + history)
    moved = harness.to_device(pools)
    recurrence = Mamba2Recurrence(A_log.to(DEVICE), A_log.to(DEVICE))
    materialise_on_device(recurrence, moved, 3, 1, 500, 500 + history)
    after = {name: pool.cpu() for name, pool in moved.items()}
    for name in ("ring_x", "ring_b", "ring_dt"):
        assert torch.equal(bits(after[name]), bits(pools[name]))
    if history:
        check_states(pools, after, exact["state"], [1])
    else:
        assert all(torch.equal(bits(after[name][1]), bits(pools[name][3])) for name in ("state", SCALE))


@FORMATS
def test_codes_of_a_coarse_scale_stay_in_range(state: torch.dtype) -> None:
    """Rows so small that their scale is the smallest number there is, and their quotients larger than the largest code."""
    a, plans, largest = SHAPES["nano"], [harness.RowPlan(3, 516, 500, 500, 0)], {INT8: 93.0, FP8: 320.0}[state]
    pools = pools_of(a, state, BF16, plans, 0)
    codes = pools["state"][3].float().clamp(-largest, largest)
    codes[..., 0] = -largest
    pools["state"][3].view(INT8).copy_(codes.to(state).view(INT8))
    pools[SCALE][3], pools["ring_x"][3] = 2.0**-148, 0.0
    expected, scale = quantise(dequantise(pools["state"][3], pools[SCALE][3]), state)
    moved, forever = harness.to_device(pools), torch.full((a.num_heads,), -200.0, device=DEVICE)
    materialise_on_device(Mamba2Recurrence(forever, forever), moved, 3, 1, 500, 516)
    assert torch.equal(moved[SCALE][1].cpu(), scale) and (scale == 2.0**-149).all()
    assert torch.equal(moved["state"][1].cpu().float(), expected.float())
    assert (expected[..., 0].float() == -LARGEST[state]).all()
