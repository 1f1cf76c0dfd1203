"""``replayssm::mamba2`` on the GPU for rows of many tokens: chunks, rings, shapes."""

from __future__ import annotations

import random
from dataclasses import replace

import harness
import pytest
import torch
from test_mamba2 import BF16, FP16, FP32, NANO, run_case

from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: Shapes of the matrix kernel: several blocks a head, whole heads, 16 channels a block, the narrowest and widest states.
SHAPES = [
    (8, 16, 32, 4),
    (8, 32, 32, 1),
    (8, 48, 64, 2),
    (8, 112, 128, 2),
    (8, 128, 128, 2),
    (8, 64, 256, 2),
    (8, 80, 256, 8),
]


def test_cases_take_the_matrix_kernel():
    for heads, head_dim, state_size, groups in SHAPES:
        a = Mamba2Attributes(heads, head_dim, state_size, groups, 16, 16)
        for activation, state in ((BF16, FP32), (FP16, FP16)):
            record = device.launch_record(a, activation, state, activation, 1, 17, (0,) * 6)
            assert record.kernel.symbol == "mamba2_prefill"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP32)], ids=str)
def test_shapes(shape, dtypes):
    run_case(shape, 150, 32, dtypes, rows=8)


@pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
def test_read_copies(state, read_dtype):
    """One of a head's blocks writes the copy of what all of them have stored."""
    run_case((4, 64, 128, 2), 100, 32, (BF16, state), rows=6, read_dtype=read_dtype)


@pytest.mark.parametrize("tokens", [17, 31, 32, 33, 63, 64, 65, 127, 129])
def test_lengths(tokens):
    """Chunks that are full, have one token too many or too few, in rows that end anywhere."""
    run_case(NANO, tokens, 16, (BF16, FP32), rows=24)


@pytest.mark.parametrize("window", [1, 5, 64])
def test_histories(window):
    """Rings of up to a chunk come before the tokens; rows that append leave room for them."""
    run_case(NANO, 40, window, (BF16, FP32), rows=24)
    run_case(NANO, 20, window, (BF16, FP32), rows=24, draft=40)


def test_strong_and_weak_decay():
    """Decays of many chunks' steps at once: no ratio of exponentials may overflow, and no sum may swamp a weight."""
    for decay in (2.5, 0.1):
        run_case(NANO, 200, 16, (BF16, FP32), rows=8, decay=decay)


def test_long_rows():
    run_case((8, 64, 128, 2), 1500, 16, (BF16, FP32), rows=2)


class Prompt:
    """Rows of random tokens of one layer, which are prefilled from their beginning."""

    def __init__(self, rows: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.attributes, self.rows, self.tokens = Mamba2Attributes(*NANO, 16, 16), rows, tokens
        width = NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2]
        self.xbc = torch.randn(rows, tokens, width, generator=generator).bfloat16().cuda()
        self.dt = torch.randn(rows, tokens, NANO[0], generator=generator).bfloat16().cuda()
        self.weights = [torch.randn(NANO[0], generator=generator).cuda() for _ in range(3)]

    def run(self, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states when the tokens come in chunks that end at ``bounds``."""
        pools = {name: p.allocate(self.rows, "cuda") for name, p in self.attributes.pools(BF16, FP32, BF16).items()}
        outputs, done = [], 0
        for end in bounds:
            plan = harness.RowPlan(0, done, done, end, end - done)
            step = harness.step_tensor([replace(plan, slot=row) for row in range(self.rows)]).cuda()
            parts = (x[:, done:end].contiguous() for x in (self.xbc, self.dt))
            outputs.append(device.mamba2(self.attributes, *parts, *self.weights, step, pools))
            done = end
        return torch.cat(outputs, 1), pools["state"].clone()


def test_chunked_prefill_equals_a_whole_one():
    """At bounds of chunks the state is the same to the bit, since a chunk ends where it would have ended anyway."""
    prompt = Prompt(3, 512)
    whole, state = prompt.run([512])
    for bounds in ([64, 512], [128, 192, 512]):
        again, after = prompt.run(bounds)
        assert torch.equal(again, whole) and torch.equal(after, state)
    again, after = prompt.run([50, 163, 512])
    assert harness.relative_error(again, whole) < harness.TOLERANCE[BF16]
    assert harness.relative_error(after, state) < harness.TOLERANCE[FP32]


def test_rows_do_not_depend_on_their_neighbours():
    prompt = Prompt(6, 200)
    whole, state = prompt.run([200])
    alone = Prompt(6, 200)
    row = random.Random(0).randrange(6)
    alone.rows, alone.xbc, alone.dt = 1, prompt.xbc[row : row + 1], prompt.dt[row : row + 1]
    got, after = alone.run([200])
    assert torch.equal(got[0], whole[row]) and torch.equal(after[0], state[row])
