"""What pools may hold and how they may lie in memory: stale values, padding, strides, high slots, 16-bit states."""

from __future__ import annotations

import math

import pytest
import torch
from replay_harness import GATED_DELTA, KDA, SPECS, Row, Simulator, Spec, assert_close, garbage, part

from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, RowMode
from trtllm_replayssm.plugins.pools import SLOT_ALIGNMENT, Pool
from trtllm_replayssm.replay import ReplayConfig

REPLAY = ReplayConfig(window=8, max_draft_len=3)
PLAN = [(5, 2), (1, 0), (4, 0), (3, 0), (4, 0), (1, 0), (2, 1), (4, 0), (6, 2), (4, 0), (1, 0), (4, 0)]

all_kinds = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def converse(sim: Simulator, slot: int, seed: int = 1) -> None:
    """A request with prefill, decode, verify and forced folds; outputs and state are held against the oracle."""
    text, answers = sim.spec.inputs(sum(n for n, _ in PLAN), seed), []
    for tokens, mode in PLAN:
        done = sim.committed(slot)
        answers.append(sim.decode(slot, part(text, done, done + tokens), RowMode(mode)))
    expected, states = sim.spec.expected(sim.weights, text)
    tolerance = 1e-9 if sim.activation == torch.float64 else 1e-4
    assert_close(torch.cat(answers), expected, tolerance)
    assert_close(sim.pools["state"][slot], states[sim.folded(slot)], tolerance)


@all_kinds
@pytest.mark.parametrize("fill", [math.nan, math.inf, -1e30])
def test_fresh_slots_read_nothing_of_the_pool(spec: Spec, fill: float) -> None:
    """Nothing is cleared at allocation, so an uninitialised pool must not show."""
    converse(Simulator(spec, REPLAY, fill=fill), 1)


@all_kinds
def test_a_recycled_slot_forgets_its_last_request(spec: Spec) -> None:
    """Zeroing the cursor row is the whole reset, whatever request, finite or not, was in the slot before."""
    sim = Simulator(spec, REPLAY)
    converse(sim, 1, seed=3)
    sim.cursors[1] = 0
    converse(sim, 1, seed=4)
    sim.decode(1, garbage(spec, 3, math.nan, 0), RowMode.DECODE)
    sim.decode(1, garbage(spec, 3, math.nan, 0), RowMode.ABSORB)
    assert sim.pools["state"][1].isnan().any()
    sim.cursors[1] = 0
    converse(sim, 1, seed=5)


@all_kinds
def test_steps_touch_their_own_slots_only(spec: Spec) -> None:
    sim = Simulator(spec, REPLAY, slots=4)
    for pool in sim.pools.values():
        pool.copy_(torch.arange(4).view(-1, *[1] * (pool.ndim - 1)).expand_as(pool))
    before = {name: pool.clone() for name, pool in sim.pools.items()}
    text = spec.inputs(30)
    for tokens, mode in ((5, 2), (4, 0), (4, 0), (4, 1), (1, 0)):
        rows = [
            Row(2, part(text, 0, tokens), RowMode(mode)),
            Row(-1, garbage(spec, tokens, math.nan, 0), RowMode(mode)),
        ]
        sim.step(rows)
        sim.commit(2, tokens)
    for name, pool in sim.pools.items():
        assert torch.equal(pool[[0, 1, 3]], before[name][[0, 1, 3]]), name
        assert not torch.equal(pool[2], before[name][2]), name


@all_kinds
@pytest.mark.parametrize("mode", list(RowMode))
def test_a_batch_of_padding_changes_nothing(spec: Spec, mode: RowMode) -> None:
    sim = Simulator(spec, REPLAY, fill=3.0)
    sim.cursors[:, 0], sim.cursors[:, 1] = 9, 6
    cursors = sim.cursors.clone()
    sim.step([Row(-1, garbage(spec, 2, math.nan, 0), mode)] * 2)
    assert torch.equal(sim.cursors, cursors)
    assert all((pool == 3.0).all() for pool in sim.pools.values())


@all_kinds
def test_a_negative_slot_is_padding_whatever_else_its_plan_says(spec: Spec) -> None:
    """A plan that was left over from another step must not fold or append through slot -1."""
    sim = Simulator(spec, REPLAY, fill=3.0)
    plan = torch.tensor([[-1, 9, 6, fold_to, 2, 0, 0, 0] for fold_to in (6, 9, 11)], dtype=torch.int32)
    text = spec.inputs(2)
    y = sim.layer({name: x.double().expand(3, -1, -1) for name, x in text.items()}, plan)
    assert not y.any()
    assert all((pool == 3.0).all() for pool in sim.pools.values())


@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 64), (4, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("slots", [1, 3])
def test_slots_are_padded_to_the_alignment(shape: tuple[int, ...], dtype: torch.dtype, slots: int) -> None:
    pool = Pool(shape, dtype, "state")
    tensor = pool.allocate(slots)
    assert tensor.shape == (slots, *shape)
    assert tensor.stride(0) * dtype.itemsize == pool.slot_bytes
    assert pool.slot_bytes % SLOT_ALIGNMENT == 0
    assert 0 <= pool.slot_bytes - tensor[0].nbytes < SLOT_ALIGNMENT
    assert not tensor.any()


@all_kinds
def test_pools_may_lie_anyhow_in_memory(spec: Spec) -> None:
    """Slot strides wider than the slot, pools inside a larger buffer, and transposed storage."""
    padded = Simulator(spec, REPLAY)
    assert any(pool.stride(0) > pool[0].numel() for pool in padded.pools.values())
    converse(padded, 2)
    strided = Simulator(spec, REPLAY)
    for name, pool in strided.pools.items():
        wide = torch.full((2 * len(pool) + 1, *pool.shape[1:], 3), math.nan, dtype=pool.dtype)
        strided.pools[name] = wide[1::2, ..., 1]
    converse(strided, 2)
    transposed = Simulator(spec, REPLAY)
    for name, pool in transposed.pools.items():
        transposed.pools[name] = torch.full(pool.shape[::-1], math.nan, dtype=pool.dtype).permute(
            *range(pool.ndim)[::-1]
        )
    converse(transposed, 2)


@all_kinds
def test_high_slots(spec: Spec) -> None:
    """Slots beyond 4096, where narrow offsets would wrap."""
    converse(Simulator(spec, REPLAY, slots=5003, activation=torch.float32), 5002)


@all_kinds
def test_pools_may_be_replaced_between_steps(spec: Spec) -> None:
    """A pool that moved to another buffer carries everything: nothing is remembered outside pools and cursors."""
    sim, text = Simulator(spec, REPLAY), spec.inputs(36)
    answers = []
    for start in range(0, 36, 3):
        sim.pools = {name: pool.clone() for name, pool in sim.pools.items()}
        sim.cursors = sim.cursors.clone()
        answers.append(sim.decode(0, part(text, start, start + 3)))
    assert_close(torch.cat(answers), spec.expected(sim.weights, text)[0], 1e-9)


@pytest.mark.parametrize("tensor", ["state", "conv_ring", "cursors"])
def test_state_rings_convolution_and_cursors_only_travel_together(tensor: str) -> None:
    """Leaving any of them behind must show: the copy of a slot is all pools and the cursor row."""
    sim = Simulator(GATED_DELTA, REPLAY, fill=0.0)
    text = GATED_DELTA.inputs(40)
    sim.decode(0, part(text, 0, 5), RowMode.ABSORB)
    sim.decode(0, part(text, 5, 9))
    kept = sim.cursors[1].clone() if tensor == "cursors" else sim.pools[tensor][1].clone()
    sim.copy_slot(0, 1)
    (sim.cursors if tensor == "cursors" else sim.pools[tensor])[1] = kept
    expected = GATED_DELTA.expected(sim.weights, part(text, 0, 11))[0][9:]
    with pytest.raises(AssertionError, match="of the scale"):
        assert_close(sim.decode(1, part(text, 9, 11)), expected, 1e-4)


@all_kinds
def test_a_float32_state_keeps_bits_below_bfloat16(spec: Spec) -> None:
    """A fold must not pass the state through a narrower type, also when activations are 16 bits wide."""
    sim = Simulator(spec, ReplayConfig(window=4), activation=torch.bfloat16)
    text = spec.inputs(12)
    for i in range(12):
        sim.decode(0, part(text, i, i + 1))
    state = sim.pools["state"][0]
    assert state.dtype == torch.float32
    assert (state != state.bfloat16().float()).float().mean() > 0.9


def decode_error(spec: Spec, window: int, dtype: str, tokens: int) -> tuple[float, int]:
    """Relative error of the outputs over the last half, and how often the checkpoint was rewritten."""
    sim = Simulator(spec, ReplayConfig(window=window, state_dtype=dtype), activation=torch.float32)
    text, answers, folds = spec.inputs(tokens), [], 0
    for i in range(tokens):
        before = sim.pools["state"][0].clone()
        answers.append(sim.decode(0, part(text, i, i + 1)))
        folds += not torch.equal(before.nan_to_num(), sim.pools["state"][0].nan_to_num())
    expected, _ = spec.expected(sim.weights, text)
    half = tokens // 2
    error = torch.cat(answers)[half:].double() - expected[half:]
    return (error.norm() / expected[half:].norm()).item(), folds


@pytest.mark.parametrize("spec", [SPECS["mamba2"], GATED_DELTA, KDA], ids=["mamba2", "gated_delta", "kda"])
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_sixteen_bit_states_are_rounded_at_folds_only(spec: Spec, dtype: str, allowed: float) -> None:
    """One rounding a fold: the error stays bounded and a wider window, which folds less often, lowers it."""
    slow = Spec(spec.kind, spec.heads, spec.dims, decay_bias=-4.0)
    errors = {}
    for window in (1, 16):
        errors[window], folds = decode_error(slow, window, dtype, 192)
        assert folds == 192 // window
    assert 0 < errors[16] < errors[1] < allowed


def test_cursor_rows_are_aligned() -> None:
    assert CURSOR_WORDS * 4 % SLOT_ALIGNMENT == 0


@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 4, 6, 32])
def test_chunks_share_the_rows_of_a_cache_between_them(block: int, chunk: int) -> None:
    """A row belongs to the chunk with the last of its positions, and to no other."""
    cache, starts = Pool((1, 64, 2), torch.float32, "kv", block), range(0, 6 * chunk, chunk)
    rows = range(6 * chunk)
    owners = [(row, start // chunk) for start in starts for row in rows[cache.rows(start, start + chunk)]]
    assert owners == [(row, ((row + 1) * block - 1) // chunk) for row in range(6 * chunk // block)]
