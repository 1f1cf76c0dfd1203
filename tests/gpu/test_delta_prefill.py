"""``replayssm::gated_delta`` and ``replayssm::kda`` on the GPU for rows of many tokens: chunks, rings, shapes, copies."""

from __future__ import annotations

import random
from dataclasses import replace

import harness
import pytest
import torch
from test_delta_rule import BF16, FP16, FP32, LAYERS, Case, Steps, run_case

from trtllm_replayssm.plugins.device import delta_prefill as prefill
from trtllm_replayssm.plugins.device import delta_rule as device
from trtllm_replayssm.plugins.device import gated_delta as device_gated_delta
from trtllm_replayssm.plugins.device import kda as device_kda
from trtllm_replayssm.plugins.read_copy import FORMATS
from trtllm_replayssm.plugins.reference import delta_rule as reference

SHAPES = [(k, v) for k in prefill.DIMS for v in prefill.DIMS]
CHANNEL_SHAPES = [shape for shape in SHAPES if shape[0] == prefill.CHANNEL_KEY_DIM]
GRIDS = ["few blocks", "many blocks"]


def launch(case: Case, rows: int):
    module = device_gated_delta if case.layer == "gated_delta" else device_kda
    ring = case.ring or case.activation
    shape = module.shape_of(case.attributes)
    return device.launch_record(shape, case.activation, case.state, ring, rows, case.tokens, (0,) * 8)


@pytest.fixture(params=GRIDS)
def grid(request, monkeypatch):
    """Either division of a head's value rows among blocks, which otherwise the size of the batch decides."""
    monkeypatch.setattr(prefill, "MULTIPROCESSORS", 0 if request.param == "many blocks" else 1 << 20)


def test_cases_take_the_prefill_kernels():
    case = Case("gated_delta", 17)
    for activation, state in ((BF16, FP32), (BF16, BF16), (FP16, FP16)):
        for dims in SHAPES:
            taken = launch(replace(case, dims=dims, activation=activation, state=state), 1)
            assert taken.kernel.symbol == "gated_delta_prefill"
    channels = replace(case, layer="kda")
    for dims in CHANNEL_SHAPES:
        assert launch(replace(channels, dims=dims), 1).kernel.symbol == "kda_prefill"
    for each in (case, channels):
        few, many = (launch(each, rows).kernel.block for rows in (1, 1000))
        assert few < many
    plain = {"tokens": 16, "draft": 15}, {"ring": FP32}, {"derived": True}, {"dims": (96, 96)}
    for changes in plain:
        assert launch(replace(case, **changes), 1).kernel.symbol == "gated_delta"
    for changes in (*plain, {"dims": (64, 64)}, {"activation": FP16}):
        assert launch(replace(channels, **changes), 1).kernel.symbol == "kda"


@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)], ids=str)
def test_shapes(dims, dtypes, grid):
    activation, state = dtypes
    run_case(Case("gated_delta", 70, dims, activation=activation, state=state, rows=8))


@pytest.mark.parametrize("dims", CHANNEL_SHAPES, ids=str)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("layer", LAYERS[1:])
def test_shapes_with_decays_per_channel(layer, dims, state, grid):
    run_case(Case(layer, 70, dims, state=state, rows=8))


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [17, 31, 32, 33, 63, 64, 65, 129])
def test_lengths(layer, tokens, grid):
    """Chunks that are full, have one token too many or too few, in rows that end anywhere."""
    run_case(Case(layer, tokens, rows=24))


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("window", [1, 5, 40, 64])
def test_histories(layer, window, grid):
    """Rings of up to four chunks come before the tokens; rows that append leave room for them."""
    run_case(Case(layer, 40, window=window, rows=24))
    run_case(Case(layer, 20, window=window, rows=24, draft=40))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("decay", [-2.0, 1.0, 2.0, 3.0])
def test_strong_and_weak_decay(layer, decay, grid):
    """From states that last to -300 a step: no exponential may overflow, no ratio may be 0/0."""
    run_case(Case(layer, 150, rows=6, decay=decay))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 4), (3, 6)], ids=str)
def test_head_ratios(heads, grid):
    run_case(Case("gated_delta", 50, heads=heads, beta_scale=2.0, rows=6))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("layer", "dims"),
    [*(("gated_delta", dims) for dims in SHAPES), *(("kda", dims) for dims in CHANNEL_SHAPES)],
    ids=str,
)
def test_read_copies(layer, dims, read, state, grid):
    """The copy's bits are those of the definition for the checkpoint that was written."""
    run_case(Case(layer, 50, dims, state=state, read=read))


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_long_rows(layer, grid):
    run_case(Case(layer, 2000, heads=(1, 2), rows=2))


class Prompt:
    """Rows of random tokens of one layer, which are prefilled from their beginning."""

    def __init__(self, layer: str, rows: int, tokens: int) -> None:
        self.case, self.rows = Case(layer, tokens), rows
        self.device = {"gated_delta": device_gated_delta.gated_delta, "kda": device_kda.kda}[layer]
        whole = [harness.RowPlan(row, 0, 0, tokens, tokens) for row in range(rows)]
        *self.inputs, self.A_log, self.dt_bias, _ = Steps(self.case, whole, rows).inputs

    def run(self, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states when the tokens come in chunks that end at ``bounds``."""
        attributes = self.case.attributes
        pools = {name: p.allocate(self.rows, "cuda") for name, p in attributes.pools(BF16, FP32, BF16).items()}
        outputs, done = [], 0
        for end in bounds:
            plan = harness.RowPlan(0, done, done, end, end - done)
            step = harness.step_tensor([replace(plan, slot=row) for row in range(self.rows)]).cuda()
            parts = (x[:, done:end].contiguous() for x in self.inputs)
            outputs.append(self.device(attributes, *parts, self.A_log, self.dt_bias, step, pools))
            done = end
        return torch.cat(outputs, 1), pools["state"].clone()


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_chunked_prefill_equals_a_whole_one(layer):
    """At bounds of chunks the state is the same to the bit, since a chunk ends where it would have ended anyway."""
    prompt = Prompt(layer, 3, 512)
    whole, state = prompt.run([512])
    for bounds in ([64, 512], [32, 192, 512]):
        again, after = prompt.run(bounds)
        assert torch.equal(again, whole) and torch.equal(after, state)
    again, after = prompt.run([50, 163, 512])
    assert harness.relative_error(again, whole) < harness.TOLERANCE[BF16]
    assert harness.relative_error(after, state) < harness.TOLERANCE[FP32]


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_long_prompts_do_not_drift(layer):
    """A prompt of 8,192 tokens that decay by a few percent each: nothing but float32's rounding adds up."""
    prompt = Prompt(layer, 1, 8192)
    prompt.A_log = prompt.A_log - 4
    got, state = prompt.run([8192])
    attributes = prompt.case.attributes
    exact = {n: p.allocate(1, "cuda").double() for n, p in attributes.pools(BF16, FP32, BF16).items()}
    inputs = (x.double() for x in prompt.inputs)
    plan = harness.step_tensor([harness.RowPlan(0, 0, 0, 8192, 8192)]).cuda()
    want = getattr(reference, layer)(attributes, *inputs, prompt.A_log, prompt.dt_bias, plan, exact)
    assert harness.relative_error(got, want) < harness.TOLERANCE[BF16]
    assert harness.relative_error(state, exact["state"]) < 1e-6


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_rows_do_not_depend_on_their_neighbours(layer):
    """Nor on how a head is divided, which the size of the batch decides."""
    prompt = Prompt(layer, 40, 200)
    whole, state = prompt.run([200])
    row = random.Random(0).randrange(40)
    prompt.rows, prompt.inputs = 1, [x[row : row + 1] for x in prompt.inputs]
    got, after = prompt.run([200])
    assert torch.equal(got[0], whole[row]) and torch.equal(after[0], state[row])
