"""The emulator finds what is wrong with a kernel, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulator.launcher import Emulation, can_emulate, load_from, run
from trtllm_replayssm.plugins.compiler import sources
from trtllm_replayssm.plugins.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs a C++ compiler on Linux")

#: Forward and backward, copies late and early, then at random.
SEEDS = range(6)
VALUES = torch.arange(128, dtype=torch.int32) * 3 + 1
SECOND_HALF = VALUES[64:]
EXCHANGED = VALUES.view(2, 64).flip(0).flatten() + torch.arange(2, dtype=torch.int32).repeat_interleave(64) * 7


def expected(symbol: str) -> Tensor:
    first = VALUES[:64]
    neighbours = VALUES.view(-1, 2).flip(1).flatten()
    lower = torch.arange(64) % 32 < 16
    return {
        "reverse_block": first.flip(0),
        "reverse_warp": first.view(2, 32).flip(1).flatten(),
        "sums_through_one_place": (first.sum() + (first * first).sum()).expand(64).int(),
        "hand_over": torch.cat([torch.zeros(32, dtype=torch.int32), first[:32]]),
        "exchange_in_cluster": EXCHANGED,
        "shared_of_cluster": VALUES.flip(0),
        "shared_of_cluster_at_once": VALUES[::64].flip(0).repeat_interleave(64),
        "lane_beyond_the_mask": neighbours[:64],
        "lanes_that_have_ended": torch.where(lower, neighbours[:64], first),
        "collectives_of_two_kinds": torch.where(lower, neighbours[:64], torch.tensor(-65536, dtype=torch.int32)),
        "wait_for_a_group": first,
        "bulk_copy_without_wait": SECOND_HALF,
        "bulk_copy_of_other_size": SECOND_HALF,
    }.get(symbol, first)


def run_example(symbol: str, fault: bool, seed: int) -> Tensor:
    want = expected(symbol)
    kernel = Kernel("examples.cu", symbol, 64, (("FAULT", int(fault)), ("CLUSTER", len(want) // 64 - 1)))
    texts = {"examples.cu": Path(__file__).with_name("examples.cu").read_bytes()}
    for name in ("async_copy", "barriers", "bulk_copy", "cluster", "mma"):
        sources(f"ptx/{name}.cuh", texts)
    sources("types.cuh", texts)
    out = torch.full_like(want, -5)
    record = Launch(kernel, (len(want) // 64, 1, 1))
    run(load_from(kernel, "sm_90a", texts), record, [VALUES.data_ptr()], [out.data_ptr()], Emulation(seed=seed))
    return out


#: What runs into an error, whatever the order, and words of it.
ERRORS = {
    "hand_over": "barrier 1 is one of|no thread can go on",
    "barrier_of_half_a_block": "no thread can go on; there wait, of 64: .* for a barrier",
    "barrier_of_half_warps": "only lanes 0000ffff of warp . have come",
    "barrier_at_two_places": r"thread .* is at another __syncthreads \(.*examples.cu:[1-9]",
    "barrier_of_those_left": "without 32 threads, which have ended",
    "shared_of_cluster": "block [01] of the cluster, whose shared memory is read, has ended",
    "lane_beyond_the_mask": "__shfl_xor_sync with the mask 0000ffff, without lane",
    "lanes_that_have_ended": "which has ended|which have ended",
    "collectives_of_two_kinds": "where lane .* is at __(shfl_xor|ballot)_sync",
    "bulk_copy_of_other_size": "no thread can go on; there wait, of 64: .* for a barrier in shared memory",
    "barrier_without_init": "nobody has initialised the barrier",
    "misaligned_load": "its alignment is 16",
    "misaligned_copy": "an access of 16 bytes",
    "index_beyond_the_array": r"index 64 of 'int \[64\]'",
    "memory_that_is_none": "which is no memory",
}
#: What gives wrong results in some order.
RACES = (
    *("reverse_block", "reverse_warp", "sums_through_one_place"),
    *("exchange_in_cluster", "shared_of_cluster_at_once", "wait_for_a_group"),
)


@pytest.mark.parametrize("symbol", [*ERRORS, *RACES, "bulk_copy_without_wait"])
def test_right_kernels_pass_in_every_order(symbol: str) -> None:
    for seed in SEEDS:
        assert torch.equal(run_example(symbol, False, seed), expected(symbol)), seed


@pytest.mark.parametrize("symbol", ERRORS)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_what_must_not_be_done_is_an_error_with_its_place(symbol: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match=f"{symbol}: block .*, thread .*, examples.cu:[1-9].*({ERRORS[symbol]})"):
        run_example(symbol, True, seed)
    # The next launch is none the worse for it.
    assert torch.equal(run_example(symbol, False, seed), expected(symbol))


@pytest.mark.parametrize("symbol", RACES)
def test_what_is_not_waited_for_shows_in_some_order(symbol: str) -> None:
    assert not all(torch.equal(run_example(symbol, True, seed), expected(symbol)) for seed in SEEDS[:2])


def test_a_copy_that_nobody_waits_for_is_an_error_when_copies_are_late() -> None:
    with pytest.raises(RuntimeError, match="the block ends before it has waited for this copy"):
        run_example("bulk_copy_without_wait", True, 0)
