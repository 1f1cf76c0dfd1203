"""Verify steps of delta-rule layers one after the other, as an engine takes them: drafts are rejected at random, and rows fold and answer."""

from __future__ import annotations

import random

import harness
import pytest
import torch
from test_delta_rule import LAYERS, Case, Steps

from trtllm_replayssm.plugins.reference import delta_rule as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOW, STEPS = 16, 10


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 16])
def test_random_acceptance(layer, tokens, dtypes):
    activation, state = dtypes
    case = Case(layer, tokens * STEPS, heads=(1, 2), draft=tokens - 1, activation=activation, state=state)
    layer_steps = Steps(case, [harness.RowPlan(0, 0, 0, 0, tokens)], 1)
    *inputs, A_log, dt_bias, _ = layer_steps.inputs
    pools = {name: pool.allocate(1, "cuda") for name, pool in case.attributes.pools(activation, state, activation).items()}
    exact = {name: pool.double().cpu() for name, pool in pools.items()}
    weights = A_log - 2, dt_bias
    exact_weights = [x.cpu() for x in weights]
    rng, committed, folded, folds = random.Random(tokens), 0, 0, 0
    for n in range(STEPS):
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
    assert folds or tokens < 3
