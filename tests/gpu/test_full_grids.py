"""The forms of kernels that only large batches take, with few rows: what counts as full is little here."""

from __future__ import annotations

from dataclasses import replace

import harness
import pytest
import test_delta_rule
import test_mamba2
import torch
from test_delta_rule import BF16, FP16, FP32, Case

from trtllm_replayssm.plugins.device import delta_rule, gated_delta, kda, mamba2, mamba2_copy
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import Launch
from trtllm_replayssm.plugins.reference import delta_rule as reference

ROWS = 3
DTYPES = [(BF16, FP32), (BF16, BF16), (FP16, FP16)]
READS = ["same", "fp8", "nvfp4"]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched in a test, on a device that few warps fill."""
    records: list[Launch] = []

    def record_and_launch(record, inputs, outputs):
        records.append(record)
        launch(record, inputs, outputs)

    monkeypatch.setattr(delta_rule, "FULL_GRID", 4)
    monkeypatch.setattr(mamba2, "WARPS_WANTED", 4)
    monkeypatch.setattr(mamba2, "VERIFY_WARPS_WANTED", 4)
    monkeypatch.setattr(mamba2_copy, "BLOCKS_WANTED", 4)
    for module in (gated_delta, kda, mamba2):
        monkeypatch.setattr(module, "launch", record_and_launch)
    return records


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_two_heads_a_block(tokens, state, read, launched):
    test_delta_rule.run_case(
        Case("gated_delta", tokens, heads=(2, 4), draft=tokens - 1, state=state, rows=ROWS, beta_scale=2.0, read=read)
    )
    assert dict(launched[0].kernel.defines)["HEADS_A_BLOCK"] == 2


def whole(layer: str, tokens: int, dtypes: tuple[torch.dtype, torch.dtype], read: str = "same") -> Case:
    """A step each of whose heads is one block's."""
    activation, state = dtypes
    draft = tokens - 1 if tokens <= 16 else 0
    return Case(layer, tokens, heads=(4, 4), draft=draft, activation=activation, state=state, read=read)


@pytest.mark.parametrize(
    ("dtypes", "read"), [((BF16, FP32), "fp8"), ((BF16, FP32), "nvfp4"), *((d, "same") for d in DTYPES)], ids=str
)
@pytest.mark.parametrize("layer", ["gated_delta", "kda"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 24])
def test_whole_heads(tokens, layer, dtypes, read, launched):
    test_delta_rule.run_case(replace(whole(layer, tokens, dtypes, read), rows=ROWS))
    assert tokens > 16 or dict(launched[0].kernel.defines)["SPLIT"] == 1


@pytest.mark.parametrize("dims", [(128, 96), (128, 256)], ids=str)
@pytest.mark.parametrize("layer", ["gated_delta", "kda"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_whole_heads_of_other_values(tokens, layer, dims):
    """Which the rows that warps fold at a time do not divide, or more often."""
    test_delta_rule.run_case(replace(whole(layer, tokens, DTYPES[0]), dims=dims))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["gated_delta", "kda"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_rows_of_whole_heads(tokens, layer, dtypes):
    """Of every kind, and beside tokens that are no numbers."""
    test_delta_rule.run_case(whole(layer, tokens, dtypes))
    test_delta_rule.run_case(whole(layer, tokens, dtypes), spoilt=True)


@pytest.mark.parametrize("tokens", [2, 4, 16])
def test_states_of_float16_under_the_strongest_decay(tokens, launched):
    """All channels decay by e^-5 a token, so that hardly anything of the checkpoint reaches the last one: that much must."""
    plans = [harness.RowPlan(n, 100, 100, 100, tokens) for n in range(ROWS)]
    case = Case("kda bounded", tokens, heads=(4, 4), draft=tokens - 1, state=FP16)
    steps = test_delta_rule.Steps(case, plans, ROWS)
    qkv, f, b, A_log, dt_bias, plan = steps.inputs
    steps.inputs = (qkv, torch.full_like(f, 20), torch.full_like(b, -60), A_log, dt_bias, plan)
    exact = {name: pool.double().cpu() for name, pool in steps.pools.items()}
    want = reference.kda(case.attributes, *(x.double().cpu() for x in steps.inputs[:5]), plan.cpu(), exact)
    got = steps.run(steps.pools)
    assert dict(launched[0].kernel.defines)["SPLIT"] == 1
    for i in range(min(tokens, 4)):
        assert harness.relative_error(got[:, i], want[:, i]) < harness.TOLERANCE[BF16], f"token {i}"


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dtypes", [*DTYPES, (BF16, FP16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_blocks_of_several_heads(tokens, dtypes, read, launched):
    """A block takes all heads of a group that fit."""
    test_mamba2.run_case((8, 64, 128, 2), tokens, 16, dtypes, draft=tokens - 1, rows=ROWS, read_dtype=read)
    assert launched[0].integers[-1] > 1


@pytest.mark.parametrize(
    ("value_dim", "window", "read"), [(256, 16, "nvfp4"), (256, 16, "fp8"), (256, 24, "same"), (192, 30, "same")]
)
def test_inputs_that_leave_shared_memory_no_tile(value_dim, window, read, launched):
    """Of long verify steps: the product with the state takes it from memory."""
    test_delta_rule.run_case(Case("gated_delta", 16, (128, value_dim), window=window, draft=15, rows=6, read=read))
    assert dict(launched[0].kernel.defines)["SPLIT"] == 1


@pytest.mark.parametrize("value_dim", [640, 1024])
def test_rows_of_values_that_few_warps_have_no_lanes_for(value_dim):
    test_delta_rule.run_case(Case("gated_delta", 1, (64, value_dim), (1, 1), rows=6, read="nvfp4"))
