"""Speculative decoding with random acceptance equals the recurrence that never saw a draft."""

from __future__ import annotations

import math
import random

import pytest
import torch
from replay_harness import KDA, SPECS, Row, Simulator, Spec, assert_close, garbage, joined, part

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig

STEPS = 200
#: What rejected drafts hold: random values, or something that would poison anything it touches.
REJECTED = (None, math.nan, math.inf, -math.inf, 1e30)


def speculate(sim: Simulator, longest: int, steps: int, seed: int, slots: tuple[int, ...]) -> None:
    """Every slot has its own request; steps mix T, ragged rows, row order, pad rows and forced folds. Checked at the end."""
    choose = random.Random(seed)
    spec, limit = sim.spec, steps * longest + 16
    texts = {slot: spec.inputs(limit, seed=100 + slot) for slot in slots}
    answers: dict[int, list[torch.Tensor]] = {slot: [] for slot in slots}
    flushes = 0
    for slot in slots:  # Prompts of different lengths put the slots at different phases.
        answers[slot].append(sim.decode(slot, part(texts[slot], 0, 3 + 4 * slot), RowMode.ABSORB))
    for number in range(steps):
        tokens = choose.randint(1, longest)
        order = choose.sample(slots, choose.randint(1, len(slots)))
        rows, accepted = [], []
        for slot in order:
            length = choose.randint(1, tokens)
            kept = length if tokens == 1 else choose.randint(1, length)
            done = sim.committed(slot)
            drafts = garbage(spec, length - kept, choose.choice(REJECTED), seed=number)
            mode = choose.choice((RowMode.DECODE,) * 9 + (RowMode.FLUSH,))
            rows.append(Row(slot, joined(part(texts[slot], done, done + kept), drafts), mode))
            accepted.append(kept)
        if choose.random() < 0.3:
            pad = choose.randint(0, len(rows))
            rows.insert(pad, Row(-1, garbage(spec, tokens, math.nan, 0)))
            accepted.insert(pad, 0)
        before = {slot: sim.folded(slot) for slot in slots}
        for row, kept, y in zip(rows, accepted, sim.step(rows, tokens)):
            if row.slot >= 0:
                answers[row.slot].append(y[:kept])
                sim.commit(row.slot, kept)
                assert 0 <= sim.committed(row.slot) - sim.folded(row.slot) <= sim.replay.window
        flushes += sum(sim.folded(slot) > before[slot] for slot in slots)
    assert flushes > 2 * len(slots), "the run must have wrapped and folded"
    tolerance = 1e-9 if sim.activation == torch.float64 else 1e-4
    for slot in slots:
        done = sim.committed(slot)
        expected, states = spec.expected(sim.weights, part(texts[slot], 0, done))
        assert_close(torch.cat(answers[slot]), expected, tolerance)
        assert_close(sim.pools["state"][slot], states[sim.folded(slot)], tolerance)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("window", "longest"), [(4, 4), (8, 8), (16, 8), (32, 8)])
def test_random_acceptance_equals_the_run_without_drafts(spec: Spec, window: int, longest: int) -> None:
    """Varying draft lengths, rejected garbage, ragged rows, pad rows, recycled rows of the ring at random wraps."""
    sim = Simulator(spec, ReplayConfig(window=window, max_draft_len=longest - 1))
    speculate(sim, longest, STEPS, seed=window, slots=(0,))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("window", "longest", "steps"), [(16, 16, 40), (64, 16, 60), (8, 3, 60)])
def test_slots_at_different_phases_share_a_batch(spec: Spec, window: int, longest: int, steps: int) -> None:
    """Permuted slot order and pad rows; T up to 16 and every small T, where masked rows of a tile could leak."""
    sim = Simulator(spec, ReplayConfig(window=window, max_draft_len=longest - 1), slots=4)
    speculate(sim, longest, steps, seed=longest, slots=(3, 0, 2))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("window", [8, 16, 32])
def test_random_acceptance_in_float32(spec: Spec, window: int) -> None:
    sim = Simulator(spec, ReplayConfig(window=window, max_draft_len=7), activation=torch.float32)
    speculate(sim, 8, STEPS, seed=window + 1, slots=(0,))


@pytest.mark.parametrize("spec", [SPECS["gated_delta"], KDA], ids=["gated_delta", "kda"])
def test_derived_fold_with_wide_rings_loses_nothing(spec: Spec) -> None:
    """Stored updates u are the same recurrence: only their rounding could tell derived from exact."""
    sim = Simulator(spec, ReplayConfig(window=16, max_draft_len=7, fold="derived"))
    speculate(sim, 8, STEPS, seed=5, slots=(0,))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_nothing_accepted_changes_nothing(spec: Spec) -> None:
    """An aborted verify step commits zero tokens; the next step answers as if it had not been."""
    sim = Simulator(spec, ReplayConfig(window=8, max_draft_len=3))
    text = spec.inputs(40)
    answers = [sim.decode(0, part(text, 0, 5), RowMode.ABSORB)]
    while sim.committed(0) < 36:
        sim.step([Row(0, garbage(spec, 4, math.nan, 0))])
        done = sim.committed(0)
        answers.append(sim.decode(0, part(text, done, done + 2)))
    expected, _ = spec.expected(sim.weights, part(text, 0, sim.committed(0)))
    assert_close(torch.cat(answers), expected, 1e-9)
