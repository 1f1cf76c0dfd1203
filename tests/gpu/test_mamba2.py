"""``replayssm::mamba2`` on the GPU."""

from __future__ import annotations

import random
from functools import partial

import harness
import pytest
import torch

from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference import mamba2 as reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: heads, head_dim, state_size, groups
NANO = (16, 64, 128, 2)
SHAPES = [NANO, (8, 32, 64, 1), (8, 80, 128, 8), (4, 128, 128, 2), (4, 64, 256, 2), (4, 128, 64, 1), (3, 24, 40, 3)]


def make_ring(generator: torch.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name == "ring_dt":
        return torch.rand(shape, generator=generator) * 0.5
    return torch.randn(shape, generator=generator)


def run_case(shape, tokens, window, dtypes, rows=24, seed=0, decay=1.0, draft=0, slots=None):
    activation, state = dtypes
    heads, head_dim, state_size, groups = shape
    ring_rows = window + (draft + 1 if draft else 0)
    attributes = Mamba2Attributes(heads, head_dim, state_size, groups, window, ring_rows, 0.001, 100.0)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    plans = harness.random_plans(rng, rows, tokens, window, ring_rows)
    pools = attributes.pools(activation, state, activation)
    pools = harness.poisoned_pools(pools, plans, rows + 3, partial(make_ring, generator))
    width = heads * head_dim + 2 * groups * state_size
    # Slices of one wider tensor, as the input projection leaves them.
    wide = torch.randn(rows, tokens, width + heads + 5 * 16, generator=generator).to(activation)
    wide = harness.poison_padding(wide, plans)
    A_log = (torch.rand(heads, generator=generator) * 4 - 2) * decay
    dt_bias, D = (torch.randn(heads, generator=generator) for _ in range(2))
    step = harness.step_tensor(plans)

    def parts(x):
        return x[..., :width], x[..., width : width + heads]

    def run_reference(p):
        return reference.mamba2(attributes, *parts(wide.double()), A_log, dt_bias, D, step, p)

    def run_device(p):
        weights = (w.cuda() for w in (A_log, dt_bias, D))
        return device.mamba2(attributes, *parts(wide.cuda()), *weights, step.cuda(), p)

    return harness.compare(run_reference, run_device, pools)


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 40])
def test_dtypes(tokens, dtypes):
    run_case(NANO, tokens, 16, dtypes, draft=3 if tokens == 4 else 15 if tokens == 16 else 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_shapes(shape, tokens):
    run_case(shape, tokens, 16, (BF16, FP32), draft=7 if tokens == 8 else 0)


@pytest.mark.parametrize("window", [1, 4, 16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 2])
def test_windows(window, tokens):
    run_case(NANO, tokens, window, (BF16, FP32), draft=tokens - 1 if window >= tokens else 0, rows=40)


def test_strong_decay():
    """Steps of -20 and more: no ratio of exponentials may overflow."""
    run_case(NANO, 8, 16, (BF16, FP32), draft=7, decay=2.5)


@pytest.mark.parametrize("seed", range(6))
def test_random(seed):
    rng = random.Random(seed)
    window, tokens = rng.choice([4, 8, 16, 24, 48]), rng.randint(1, 16)
    shape = (8, rng.choice([32, 64, 80, 128]), rng.choice([64, 128, 256]), rng.choice([1, 2, 4, 8]))
    draft = tokens - 1 if window >= tokens else 0
    run_case(shape, tokens, window, (BF16, rng.choice([FP32, BF16])), seed=seed, draft=draft, rows=30)
