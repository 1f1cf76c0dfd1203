"""Gates from one end to the other, every ratio of heads, long runs, and what derived folds cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from replay_harness import (
    GATED_DELTA,
    KDA,
    KDA_BOUNDED,
    MAMBA2,
    SPECS,
    Row,
    Simulator,
    Spec,
    assert_close,
    garbage,
    joined,
    part,
)

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig

REPLAY = ReplayConfig(window=16, max_draft_len=3)
all_kinds = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def check(
    spec: Spec, tokens: int, tolerance: float, replay: ReplayConfig = REPLAY, activation: torch.dtype = torch.float64
) -> Simulator:
    """A prefill, then verify steps of 4 with 1 to 4 accepted; outputs and the last checkpoint against the oracle."""
    sim, text = Simulator(spec, replay, activation=activation), spec.inputs(tokens)
    answers, step = [sim.decode(0, part(text, 0, 6), RowMode.ABSORB)], 0
    while (done := sim.committed(0)) < tokens:
        kept = min(1 + step % 4, tokens - done)
        drafts = garbage(spec, 4 - kept, None, seed=step)
        answers.append(sim.step([Row(0, joined(part(text, done, done + kept), drafts))])[0][:kept])
        sim.commit(0, kept)
        step += 1
    expected, states = spec.expected(sim.weights, text)
    assert_close(torch.cat(answers), expected, tolerance)
    assert_close(sim.pools["state"][0], states[sim.folded(0)], tolerance)
    return sim


@all_kinds
@pytest.mark.parametrize(("activation", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_strong_gates(spec: Spec, activation: torch.dtype, tolerance: float) -> None:
    """Decays near exp(-20) and far below it for many steps: products of exponentials would be 0 * inf."""
    bound = {"lower_bound": -20.0} if "lower_bound" in spec.options else {}
    strong = replace(spec, rate=(3.0, 4.0), decay_bias=2.0, options=dict(spec.options) | bound)
    sim = check(strong, 60, tolerance, activation=activation)
    decays = (
        sim.pools["ring_dt"] * sim.weights["A_log"].exp()[:, None] if spec.kind == "mamba2" else -sim.pools["ring_g"]
    )
    assert decays[0].median() > 18, "the gates must have been strong"


@all_kinds
def test_weak_gates(spec: Spec) -> None:
    """Nothing is forgotten: the state keeps growing or turning, and no error may pile up in float64."""
    check(replace(spec, decay_bias=-9.0), 120, 1e-9)


@all_kinds
def test_no_drift_over_two_thousand_tokens(spec: Spec) -> None:
    """Exact folds are closed loop: the float32 error after 2,048 tokens is that of the float32 recurrence itself."""
    slow = Spec(spec.kind, (2, 2), (8, 6), spec.options, decay_bias=-5.0)
    sim, text = Simulator(slow, REPLAY, activation=torch.float32), slow.inputs(2048)
    while (done := sim.committed(0)) < 2048:
        y = sim.decode(0, part(text, done, done + 4))
    expected, states = slow.expected(sim.weights, text)
    assert_close(y, expected[-4:], 1e-4)
    assert_close(sim.pools["state"][0], states[sim.folded(0)], 1e-4)


@pytest.mark.parametrize("limits", [(0.0, 0.4), (0.9, math.inf), (0.3, 0.6), (0.0, math.inf)])
def test_time_steps_are_clamped(limits: tuple[float, float]) -> None:
    """The ring holds the clamped step, so folds see what the answer saw."""
    spec = replace(MAMBA2, options={"dt_min": limits[0], "dt_max": limits[1]})
    sim = check(spec, 50, 1e-9)
    ring = sim.pools["ring_dt"][0]
    assert ring.min() >= limits[0]
    assert ring.max() <= limits[1]


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (2, 4), (2, 6), (2, 8), (8, 8)])
@pytest.mark.parametrize("kind", ["mamba2", "gated_delta"])
def test_heads_share_groups_in_order(kind: str, heads: tuple[int, int]) -> None:
    """Ratios 1, 2, 3 and 4, one group and one group a head."""
    check(Spec(kind, heads, (5, 4)), 40, 1e-9)


@pytest.mark.parametrize("dims", [(4, 12), (12, 4), (1, 3), (16, 16)])
@all_kinds
def test_keys_and_values_may_differ_in_width(spec: Spec, dims: tuple[int, int]) -> None:
    check(replace(spec, dims=dims), 40, 1e-9)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 7])
def test_convolution_kernels_roll_back(kernel: int) -> None:
    check(replace(MAMBA2, kernel=kernel), 40, 1e-9)


def test_negative_eigenvalues() -> None:
    """beta up to 2 lets a step turn the state around."""
    sim = check(replace(GATED_DELTA, options={"beta_scale": 2.0}), 60, 1e-9)
    assert sim.pools["ring_beta"][0].max() > 1


@pytest.mark.parametrize("bound", [-0.5, -5.0, -30.0])
def test_bounded_gates_stay_above_their_bound(bound: float) -> None:
    sim = check(replace(KDA, options={"lower_bound": bound}), 50, 1e-9)
    assert sim.pools["ring_g"][0].min() >= bound
    assert sim.pools["ring_g"][0].max() <= 0


@pytest.mark.parametrize("spec", [GATED_DELTA, KDA, KDA_BOUNDED], ids=["gated_delta", "kda", "kda_bounded"])
def test_zero_keys_are_normalised_without_a_division_by_zero(spec: Spec) -> None:
    """The epsilon stands under the root: a zero key stays zero, a tiny one is scaled by its formula."""
    sim = Simulator(spec, REPLAY)
    sim.weights["conv_bias"] = torch.zeros(spec.channels)
    text = spec.inputs(12)
    text["packed"] *= torch.tensor([0.0, 1e-4, 1.0] * 4)[:, None]
    y = sim.decode(0, text)
    assert_close(y, spec.expected(sim.weights, text)[0], 1e-9)


@pytest.mark.parametrize("spec", [GATED_DELTA, KDA], ids=["gated_delta", "kda"])
def test_derived_rings_hold_updates_and_exact_rings_hold_values(spec: Spec) -> None:
    """u differs from v, yet folds to the same state."""
    folded = {}
    for fold in ("exact", "derived"):
        sim, text = Simulator(spec, ReplayConfig(window=16, max_draft_len=3, fold=fold)), spec.inputs(24)
        for start in range(0, 24, 4):
            sim.decode(0, part(text, start, start + 4))
        sim.materialise(0, 1, 24)
        folded[fold] = sim
    exact, derived = folded["exact"].pools, folded["derived"].pools
    assert torch.equal(exact["ring_k"].nan_to_num(), derived["ring_k"].nan_to_num())
    assert not torch.allclose(exact["ring_v"].nan_to_num(), derived["ring_v"].nan_to_num())
    assert_close(derived["state"][1], exact["state"][1], 1e-12)


@pytest.mark.parametrize("spec", [GATED_DELTA, KDA], ids=["gated_delta", "kda"])
def test_the_rounding_of_updates_is_bounded(spec: Spec) -> None:
    """float16 keeps more of u than bfloat16, and both stay within what their bits promise."""
    slow, errors = replace(spec, decay_bias=-4.0), {}
    for dtype in ("bfloat16", "float16"):
        replay = ReplayConfig(window=16, fold="derived", ring_dtype=dtype)
        sim, text = Simulator(slow, replay, activation=torch.float32), slow.inputs(256)
        for i in range(256):
            sim.decode(0, part(text, i, i + 1))
        state = slow.expected(sim.weights, text)[1][sim.folded(0)]
        errors[dtype] = ((sim.pools["state"][0] - state).norm() / state.norm()).item()
    assert 1e-6 < errors["float16"] < errors["bfloat16"] / 3
    assert errors["bfloat16"] < 1e-2
