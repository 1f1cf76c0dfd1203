"""Runs a plugin's CUDA implementation against its float64 reference on the same tensors.

Everything that a kernel must not read holds NaN: rings outside their live rows, checkpoints with ``folded == 0``, padding
tokens, slots of no row. Everything that it must not write is compared bit by bit afterwards.

A read copy starts as the quantised checkpoint of its slot, so that outputs from it are exactly defined; after the step it
must be, bit for bit, what the definition makes of the checkpoint that the kernel wrote.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.reference.read_copy import write_copy

#: Largest accepted relative error of a result that is rounded once to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
#: E4M3's NaN, the poison of codes and block scales.
NAN_BITS = 0x7F


@dataclass(frozen=True)
class RowPlan:
    """One row of a step; the fields of plugins.cursors.Step."""

    slot: int
    committed: int
    folded: int
    fold_to: int
    query_len: int

    @property
    def live(self) -> range:
        """Positions in the ring."""
        return range(self.folded, self.committed)


def random_plans(rng: random.Random, rows: int, tokens: int, window: int, ring_rows: int) -> list[RowPlan]:
    """Rows in random slots with every kind of history: empty, full, wrapped, without a checkpoint; some are padding."""
    slots = rng.sample(range(rows + 3), rows)
    return [random_plan(rng, slot, tokens, window, ring_rows) for slot in slots]


def random_plan(rng: random.Random, slot: int, tokens: int, window: int, ring_rows: int) -> RowPlan:
    if rng.random() < 0.1:
        return RowPlan(-1, 0, 0, 0, 0)
    longest = window if ring_rows > window else window - 1
    history = rng.choice([0, longest, rng.randint(0, longest), rng.randint(0, longest)])
    folded = rng.choice([0, rng.randint(1, 5000), rng.randint(1, 5000)])
    committed = folded + history
    query_len = rng.choice([tokens, rng.randint(1, tokens)])
    mode = rng.choice(["append", "flush", "absorb"])
    # With a window of 1 every step of one token absorbs (plugins/advance.py).
    if mode == "absorb" or history + query_len > ring_rows or window == tokens == 1:
        return RowPlan(slot, committed, folded, committed + query_len, query_len)
    return RowPlan(slot, committed, folded, committed if mode == "flush" else folded, query_len)


def step_tensor(plans: list[RowPlan]) -> Tensor:
    step = torch.zeros(len(plans), STEP_WORDS, dtype=torch.int32)
    for row, p in enumerate(plans):
        step[row, :5] = torch.tensor([p.slot, p.committed, p.folded, p.fold_to, p.query_len])
        # Kernels may take rows up in any order: here, the last one first.
        step[row, Step.TURN] = len(plans) - 1 - 2 * row
    return step


def poisoned_pools(
    pools: Mapping[str, Pool], plans: list[RowPlan], slots: int, make: Callable[[str, tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    """Pools on the CPU, NaN but for what the plans may read, which ``make(name, shape)`` provides."""
    tensors = {}
    for name, pool in pools.items():
        tensor = pool.allocate(slots).fill_(NAN_BITS if pool.dtype == torch.int8 else float("nan"))
        for plan in plans:
            if plan.slot < 0 or pool.kind == "copy":
                continue
            if pool.kind == "ring":
                rows = [p % pool.shape[1] for p in plan.live]
                tensor[plan.slot, :, rows] = make(name, (pool.shape[0], len(rows), *pool.shape[2:])).to(pool.dtype)
            elif plan.folded:
                tensor[plan.slot] = make(name, pool.shape).to(pool.dtype)
        tensors[name] = tensor
    write_copy(tensors, torch.tensor([plan.slot for plan in plans if plan.slot >= 0 and plan.folded], dtype=torch.long))
    return tensors


def poison_padding(x: Tensor, plans: list[RowPlan]) -> Tensor:
    """``x [rows, T, ...]`` with NaN in padding rows and tokens."""
    for row, plan in enumerate(plans):
        x[row, plan.query_len if plan.slot >= 0 else 0 :] = float("nan")
    return x


def flushing_plans(tokens: int, longest: int) -> list[RowPlan]:
    """Rows with histories of 1 to ``longest`` tokens that fold these alone; those in odd slots are meant to be spoilt."""
    return [RowPlan(2 * n + odd, 100 + n, 100, 100 + n, tokens) for n in range(1, longest + 1) for odd in (0, 1)]


def spoil(x: Tensor, plans: list[RowPlan]) -> Tensor:
    """``x [rows, T, ...]`` with NaN, infinities or a few of either in the tokens of rows in odd slots."""
    for row, plan in enumerate(plans):
        if plan.slot % 2:
            x[row, :, :: 1 + plan.slot % 3] = (float("nan"), float("inf"), -float("inf"))[plan.slot // 2 % 3]
    return x


def sound_rows(plans: list[RowPlan]) -> list[int]:
    return [row for row, plan in enumerate(plans) if plan.slot % 2 == 0]


def widened(pools: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in float64; of a read copy as it is."""
    return {name: pool.clone() if is_copy(name) else pool.double() for name, pool in pools.items()}


def is_copy(name: str) -> bool:
    return name.startswith("read_")


def expected_copy(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The read copy of pools on the CPU: quantised again where the checkpoint was written, untouched elsewhere."""
    expected = {name: pool.clone() for name, pool in before.items() if is_copy(name)}
    if not expected:
        return {}
    expected["state"] = after["state"]
    changed = (after["state"].nan_to_num(7) != before["state"].nan_to_num(7)).flatten(1).any(1)
    write_copy(expected, changed.nonzero(as_tuple=True)[0])
    return expected


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|``; infinite where one is finite and the other is not."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    difference = (actual - expected).nan_to_num(0.0).norm()
    return float(difference / expected.nan_to_num(0.0).norm().clamp(min=1e-30))


def to_device(pools: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the GPU that keep the padded slot strides."""
    moved = {}
    for name, pool in pools.items():
        flat = torch.empty(pool.shape[0], pool.stride(0), dtype=pool.dtype, device="cuda")
        moved[name] = flat[:, : pool[0].numel()].unflatten(1, pool.shape[1:])
        moved[name].copy_(pool)
    return moved


def shifted(x: Tensor, elements: int) -> Tensor:
    """A copy on the GPU that starts so many elements behind an address on which any access may start."""
    flat = torch.empty(x.numel() + elements, dtype=x.dtype, device="cuda")
    return flat[elements:].view(x.shape).copy_(x)


def compare(
    run_reference: Callable[[dict[str, Tensor]], Tensor],
    run_device: Callable[[dict[str, Tensor]], Tensor],
    pools: dict[str, Tensor],
    tolerances: Mapping[str, float] | None = None,
    ignored: Collection[str] = (),
) -> dict[str, float]:
    """Relative errors of ``y`` and of every pool after one step; asserts that each is within its tolerance.

    Both run from copies of ``pools``: the reference in float64, the device in the pools' own dtypes.
    tolerances: by name, where TOLERANCE of the dtype is not the right bound. ignored: names of pools.
    """
    expected, actual = widened(pools), to_device(pools)
    want = run_reference(expected)
    got = run_device(actual)
    torch.cuda.synchronize()
    errors = {"y": relative_error(got, want)}
    bounds = {"y": TOLERANCE[got.dtype]}
    copies = expected_copy(pools, {name: pool.cpu() for name, pool in actual.items()})
    for name in pools.keys() - set(ignored):
        pool = pools[name]
        if is_copy(name):
            bits = (tensor.cpu().contiguous().view(torch.uint8) for tensor in (actual[name], copies[name]))
            errors[name], bounds[name] = float(not torch.equal(*bits)), 0.0
        else:
            errors[name] = relative_error(actual[name], expected[name].to(pool.dtype))
            bounds[name] = TOLERANCE[pool.dtype]
    bounds |= tolerances or {}
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    assert not wrong, f"errors {wrong} exceed {bounds}; all: {errors}"
    return errors
