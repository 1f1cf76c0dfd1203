"""Verify steps of delta-rule layers one after the other: drafts are rejected at random, and rows fold and answer."""

from __future__ import annotations

import random

import harness
import pytest
import torch
from test_delta_rule import LAYERS, Case, Steps, run_case

from trtllm_replayssm.plugins.device import delta_rule
from trtllm_replayssm.plugins.reference import delta_rule as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOW = 16
#: Blocks that fill the GPU, by which heads are divided: not at all, in halves, into the narrowest slices.
GRIDS = {"whole heads": 1, "halves": 4, "slices": 512}


@pytest.fixture(params=GRIDS)
def grid(request, monkeypatch):
    monkeypatch.setattr(delta_rule, "FULL_GRID", GRIDS[request.param])


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16)], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 16])
def test_random_acceptance(layer, tokens, dtypes, grid):
    activation, state = dtypes
    steps = 20 if tokens == 2 else 10
    case = Case(layer, tokens * steps, heads=(1, 2), draft=tokens - 1, activation=activation, state=state)
    layer_steps = Steps(case, [harness.RowPlan(0, 0, 0, 0, tokens)], 1)
    *inputs, A_log, dt_bias, _ = layer_steps.inputs
    pools = {
        name: pool.allocate(1, "cuda") for name, pool in case.attributes.pools(activation, state, activation).items()
    }
    exact = {name: pool.double().cpu() for name, pool in pools.items()}
    weights = A_log - 2, dt_bias
    exact_weights = [x.cpu() for x in weights]
    rng, committed, folded, folds = random.Random(tokens), 0, 0, 0
    for n in range(steps):
        fold_to = committed if committed - folded + tokens > WINDOW else folded
        folds += fold_to > folded
        plan = harness.step_tensor([harness.RowPlan(0, committed, folded, fold_to, tokens)])
        drafts = [x[:, n * tokens : (n + 1) * tokens] for x in inputs]
        want = getattr(reference, layer.split()[0])(
            case.attributes, *(x.double().cpu() for x in drafts), *exact_weights, plan, exact
        )
        got = layer_steps.device(case.attributes, *drafts, *weights, plan.cuda(), pools)
        assert harness.relative_error(got, want) < harness.TOLERANCE[activation], f"step {n}"
        exact["state"] = exact["state"].to(state).double()
        assert harness.relative_error(pools["state"], exact["state"]) < 2 * harness.TOLERANCE[state], f"step {n}"
        committed, folded = committed + rng.randint(1, tokens), fold_to
    assert folds


@pytest.mark.parametrize("read", ["same", "fp8"])
@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_tokens_that_are_no_numbers_leave_folded_histories_alone(tokens, read):
    """Of every length, in heads whose ring the fold takes up apart from the answer, or before it."""
    run_case(Case("kda", tokens, heads=(1, 2), draft=tokens - 1, read=read), spoilt=True)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [3, 4, 8, 16])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_absorbed_tokens(layer, tokens, state, grid):
    """Short ends of prompts: rows are answered, folded with histories of every length and not appended."""
    plans = [harness.RowPlan(n, 70 + n, 70, 70 + n + 1 + n % tokens, 1 + n % tokens) for n in range(17)]
    run_case(Case(layer, tokens, heads=(1, 2), draft=tokens - 1, rows=len(plans), state=state), plans=plans)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_a_draft_that_is_no_number_leaves_tokens_before_it_alone(layer, tokens, state, grid):
    """Neither its query nor its values reach them, in a row that folds and one that does not (keys and gates do)."""
    history = 110 if tokens < 16 else 101
    plans = [harness.RowPlan(0, history, 100, history, tokens), harness.RowPlan(1, 100, 100, 100, tokens)]
    steps = Steps(Case(layer, tokens, heads=(1, 2), draft=tokens - 1, state=state), plans, 2)

    def run():
        return steps.run({name: pool.clone(memory_format=torch.preserve_format) for name, pool in steps.pools.items()})

    sound = run()
    qkv, *others = (x.clone() for x in steps.inputs)
    keys = 128 if layer == "gated_delta" else 256
    qkv[:, -1, :keys], qkv[:, -1, 2 * keys :] = torch.nan, torch.inf
    steps.inputs = (qkv, *others)
    spoilt = run()
    assert torch.equal(spoilt[:, :-1], sound[:, :-1])
    assert not torch.isfinite(spoilt[:, -1]).any()
