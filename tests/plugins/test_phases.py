"""Every ring phase and wrap: folds, continuation, window 1, materialise, preempt and resume."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from replay_harness import SPECS, Row, Simulator, Spec, assert_close, garbage, joined, part
from torch.nn.functional import softplus

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.plugins.reference import conv
from trtllm_replayssm.replay import ReplayConfig

WINDOW, DRAFTS = 6, 2
RING = WINDOW + DRAFTS + 1
REPLAY = ReplayConfig(window=WINDOW, max_draft_len=DRAFTS)

all_kinds = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def at_phase(spec: Spec, history: int, start: int, activation: torch.dtype = torch.float64) -> tuple[Simulator, dict]:
    """A simulator whose slot 0 has folded ``start`` tokens and holds ``history`` more in its ring."""
    sim, text = Simulator(spec, REPLAY, activation=activation), spec.inputs(start + history + 12, seed=start)
    sim.decode(0, part(text, 0, start), RowMode.ABSORB)
    done = start
    while done < start + history:
        # Two-token rows never absorb, so the ring fills to any phase; the last of an odd count is a rejected draft.
        kept = min(2, start + history - done)
        sim.step([Row(0, joined(part(text, done, done + kept), garbage(spec, 2 - kept, math.nan, 0)))])
        sim.commit(0, kept)
        done += kept
    return sim, text


@all_kinds
@pytest.mark.parametrize("history", range(WINDOW + 1))
def test_every_history_and_wrap(spec: Spec, history: int) -> None:
    """Row 0 of the live ring stands at every physical row, and every following step type answers rightly."""
    for start in range(1, RING + 1):
        for tokens, mode in (
            (1, RowMode.DECODE),
            (3, RowMode.DECODE),
            (1, RowMode.FLUSH),
            (3, RowMode.FLUSH),
            (7, RowMode.ABSORB),
        ):
            sim, text = at_phase(spec, history, start)
            assert (sim.committed(0), sim.folded(0)) == (start + history, start)
            done = sim.committed(0)
            y = sim.decode(0, part(text, done, done + tokens), mode)
            expected, states = spec.expected(sim.weights, part(text, 0, done + tokens))
            assert_close(y, expected[done:], 1e-9)
            assert_close(sim.pools["state"][0], states[sim.folded(0)], 1e-9)
            if mode == RowMode.FLUSH:
                assert sim.folded(0) in (done, done + tokens)
            if mode == RowMode.ABSORB:
                assert sim.folded(0) == done + tokens


@all_kinds
@pytest.mark.parametrize("history", range(WINDOW + 1))
def test_steps_that_do_not_fold_leave_the_checkpoint_alone(spec: Spec, history: int) -> None:
    sim, text = at_phase(spec, history, 4)
    before, folded = sim.pools["state"].clone(), sim.folded(0)
    done = sim.committed(0)
    sim.step([Row(0, part(text, done, done + 3))])
    assert torch.equal(sim.pools["state"][0], before[0]) == (sim.folded(0) == folded)
    assert (sim.folded(0) == folded) == (done - folded + 3 <= WINDOW)


@all_kinds
def test_turns_continue_on_a_ring_that_holds_history(spec: Spec) -> None:
    """A second prompt is absorbed on top of decoded tokens that are still in the ring."""
    sim, text = Simulator(spec, REPLAY), spec.inputs(90)
    answers = []
    for tokens, mode in [
        (9, 2),
        (1, 0),
        (3, 0),
        (11, 2),
        (2, 0),
        (2, 0),
        (1, 2),
        (3, 0),
        (30, 2),
        (1, 0),
        (1, 1),
        (3, 0),
    ]:
        done = sim.committed(0)
        answers.append(sim.decode(0, part(text, done, done + tokens), RowMode(mode)))
    expected, _ = spec.expected(sim.weights, part(text, 0, sim.committed(0)))
    assert_close(torch.cat(answers), expected, 1e-9)


@all_kinds
@pytest.mark.parametrize("first_mode", [RowMode.DECODE, RowMode.FLUSH])
def test_a_request_may_start_without_a_prefill(spec: Spec, first_mode: RowMode) -> None:
    """A one-token prompt run as a decode row: the stale checkpoint is not read, a flush of nothing folds nothing."""
    sim, text = Simulator(spec, REPLAY), spec.inputs(10)
    answers = [sim.decode(0, part(text, i, i + 1), first_mode) for i in range(10)]
    assert_close(torch.cat(answers), spec.expected(sim.weights, text)[0], 1e-9)


@all_kinds
@pytest.mark.parametrize("sizes", [(1,) * 30, (2, 3, 25), (7, 7, 7, 9)])
def test_chunks_of_any_size_are_the_whole_prefill(spec: Spec, sizes: tuple[int, ...]) -> None:
    sim, text = Simulator(spec, REPLAY), spec.inputs(30)
    expected, states = spec.expected(sim.weights, text)
    answers, done = [], 0
    for size in sizes:
        answers.append(sim.decode(0, part(text, done, done + size), RowMode.ABSORB))
        done += size
        assert_close(sim.pools["state"][0], states[done], 1e-9)
    assert_close(torch.cat(answers), expected, 1e-9)


def ordinary_step(spec: Spec, weights: dict, state: torch.Tensor, packed: torch.Tensor, gates: dict) -> torch.Tensor:
    """The next state ``[Hv, V, K]`` in float32 as an engine without rings computes it: ``packed`` is post-convolution."""
    (groups, heads), (width, values) = spec.heads, spec.dims
    keys, ratio = groups * width, heads // groups
    if spec.kind == "mamba2":
        x, b, _ = packed.split([heads * values, keys, keys])
        dt = softplus(gates["dt"] + weights["dt_bias"])
        decay, u, k = (
            (-weights["A_log"].exp() * dt).exp()[:, None],
            dt[:, None] * x.view(heads, values),
            b.view(groups, width),
        )
        state = decay[..., None] * state
    else:
        _, k, v = packed.split([keys, keys, heads * values])
        k = k.view(groups, width)
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        logits = (gates.get("a", gates.get("f")) + weights["dt_bias"]).view(heads, -1)
        rate = weights["A_log"].exp()[:, None]
        bound = spec.options.get("lower_bound")
        g = -rate * softplus(logits) if bound is None else bound * (rate * logits).sigmoid()
        state = g.exp()[:, None] * state
        predicted = (k[:, None] @ state.view(groups, ratio * values, width).transpose(1, 2)).view(heads, values)
        u = gates["b"].sigmoid()[:, None] * (v.view(heads, values) - predicted)
    return torch.addcmul(state, u[..., None], k.repeat_interleave(ratio, 0)[:, None])


@all_kinds
def test_window_one_is_the_ordinary_recurrence_bit_for_bit(spec: Spec) -> None:
    """Every step folds, and the checkpoint is exactly what a step without a ring would have written."""
    sim, text = Simulator(spec, ReplayConfig(window=1), activation=torch.float32), spec.inputs(24)
    convolved = Simulator(spec, ReplayConfig(window=1), activation=torch.float32)
    convolved.layer = lambda batch, plan: conv.causal_conv(  # type: ignore[method-assign]
        sim.conv_attributes,
        batch["packed"],
        sim.weights["conv"],
        sim.weights["conv_bias"],
        plan,
        convolved.pools["conv_ring"],
    )
    state = torch.zeros(sim.pools["state"].shape[1:])
    for i in range(24):
        token = part(text, i, i + 1)
        state = ordinary_step(
            spec, sim.weights, state, convolved.decode(0, token)[0], {n: token[n][0] for n in spec.gates}
        )
        sim.decode(0, token)
        assert sim.folded(0) == i + 1
        assert torch.equal(sim.pools["state"][0], state)


@all_kinds
@pytest.mark.parametrize("history", range(WINDOW + 1))
def test_materialise_at_every_phase_and_prefix(spec: Spec, history: int) -> None:
    """Boundary states are complete, land in another slot, and the source goes on untouched."""
    for start in (1, 5, RING):
        sim, text = at_phase(spec, history, start)
        _, states = spec.expected(sim.weights, part(text, 0, sim.committed(0)))
        for prefix in range(sim.folded(0), sim.committed(0) + 1):
            before = {name: pool.clone() for name, pool in sim.pools.items()}
            sim.materialise(0, 2, prefix)
            assert_close(sim.pools["state"][2], states[prefix], 1e-9)
            for name, pool in sim.pools.items():
                same = pool[:2] if name == "state" else pool
                assert torch.equal(same.nan_to_num(7.0), before[name][: len(same)].nan_to_num(7.0)), name


@all_kinds
@pytest.mark.parametrize("history", [0, 1, 3, 5])
def test_a_materialised_slot_continues_the_request(spec: Spec, history: int) -> None:
    """A prefix hit: the published slot plus the convolution ring goes its own way while the source goes on."""
    sim, text = at_phase(spec, history, 7)
    other = spec.inputs(8, seed=99)
    done = sim.committed(0)
    sim.materialise(0, 1, done)
    sim.pools["conv_ring"][1] = sim.pools["conv_ring"][0]
    sim.cursors[1, :2] = done
    ours, theirs = [], []
    for i in range(8):
        first, second = sim.step([Row(0, part(text, done + i, done + i + 1)), Row(1, part(other, i, i + 1))])
        ours.append(first), theirs.append(second)
        sim.commit(0, 1), sim.commit(1, 1)
    assert_close(torch.cat(ours), spec.expected(sim.weights, part(text, 0, done + 8))[0][done:], 1e-9)
    branch = joined(part(text, 0, done), other)
    assert_close(torch.cat(theirs), spec.expected(sim.weights, branch)[0][done:], 1e-9)


@all_kinds
def test_materialise_does_not_read_a_checkpoint_that_holds_nothing(spec: Spec) -> None:
    """An empty prefix of a slot without a checkpoint is the zero state, whatever the slot holds: NaN here."""
    sim = Simulator(spec, REPLAY, slots=2)
    sim.materialise(0, 1, 0)
    assert (sim.pools["state"][1] == 0).all()


def test_materialise_refuses_what_the_checkpoint_has_passed() -> None:
    sim, _ = at_phase(SPECS["mamba2"], 3, 5)
    with pytest.raises(ValueError, match="already holds 5 tokens, more than 4"):
        sim.materialise(0, 1, 4)
    with pytest.raises(ValueError, match="two different slots"):
        sim.materialise(0, 0, 6)


@all_kinds
@pytest.mark.parametrize("history", range(WINDOW + 1))
def test_preempt_and_resume_is_bit_exact_at_every_phase(spec: Spec, history: int) -> None:
    """Ring phase comes from positions, not from a step count, so a slot's rows continue anywhere."""
    sim, text = at_phase(spec, history, 5, activation=torch.float32)
    sim.copy_slot(0, 2)
    # Somebody else uses the old slot meanwhile; the request goes on in slot 2. An undisturbed copy is the witness.
    witness, done = copy.deepcopy(sim), sim.committed(0)
    sim.cursors[0] = 0
    sim.decode(0, spec.inputs(9, seed=50), RowMode.ABSORB)
    for tokens in (1, 3, 1, 2, 3):
        token = part(text, done, done + tokens)
        assert torch.equal(sim.decode(2, token), witness.decode(0, token))
        done += tokens
    assert torch.equal(sim.pools["state"][2], witness.pools["state"][0])
