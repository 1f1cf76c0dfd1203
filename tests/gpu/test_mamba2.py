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


def run_case(shape, tokens, window, dtypes, rows=24, seed=0, decay=1.0, draft=0):
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16)])
def test_prefill(shape, dtypes):
    """Chunks longer than a ring, some rows continuing one, some only a token or two long."""
    run_case(shape, 150, 32, dtypes, rows=10)


@pytest.mark.parametrize("seed", range(6))
def test_random(seed):
    rng = random.Random(seed)
    window, tokens = rng.choice([4, 8, 16, 24, 48]), rng.randint(1, 16)
    shape = (8, rng.choice([32, 64, 80, 128]), rng.choice([64, 128, 256]), rng.choice([1, 2, 4, 8]))
    draft = tokens - 1 if window >= tokens else 0
    run_case(shape, tokens, window, (BF16, rng.choice([FP32, BF16])), seed=seed, draft=draft, rows=30)


def device_step(attributes, rows, tokens, plans, pools, seed=0):
    """A function that runs one step on fresh copies of ``pools``' contents and returns y and the pools."""
    generator = torch.Generator().manual_seed(seed)
    a = attributes
    width = a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size
    xbc = torch.randn(rows, tokens, width, generator=generator).bfloat16().cuda()
    dt = torch.randn(rows, tokens, a.num_heads, generator=generator).bfloat16().cuda()
    A_log, dt_bias, D = (torch.randn(a.num_heads, generator=generator).cuda() for _ in range(3))
    step = harness.step_tensor(plans).cuda()

    def run():
        return device.mamba2(a, xbc, dt, A_log, dt_bias, D, step, pools)

    return run


def nano_case(tokens, rows=16, slots=20):
    attributes = Mamba2Attributes(*NANO, 16, 16 + (tokens if 1 < tokens <= 16 else 0))
    plans = harness.random_plans(random.Random(3), rows, tokens, 16, attributes.ring_rows)
    make = partial(make_ring, torch.Generator().manual_seed(3))
    pools = harness.poisoned_pools(attributes.pools(BF16, FP32, BF16), plans, slots, make)
    return attributes, plans, pools


@pytest.mark.parametrize("tokens", [1, 8, 50])
def test_repeats_and_graph_replay_are_bit_identical(tokens):
    attributes, plans, fresh = nano_case(tokens)
    pools = harness.to_device(fresh)
    run = device_step(attributes, 16, tokens, plans, pools)

    def restored(step):
        for name, pool in fresh.items():
            pools[name].copy_(pool)
        return step().clone(), {name: pool.clone() for name, pool in pools.items()}

    first, state = restored(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()

    def replay():
        graph.replay()
        return captured

    for step in [run] * 100 + [replay] * 100:
        again, now = restored(step)
        assert torch.equal(again.nan_to_num(7), first.nan_to_num(7))
        assert all(torch.equal(now[name].nan_to_num(7), pool.nan_to_num(7)) for name, pool in state.items())


@pytest.mark.parametrize("tokens", [1, 50])
def test_results_do_not_depend_on_the_slot(tokens):
    """Slots more than 2^31 elements into a pool give the same bits as near ones."""
    attributes, plans, fresh = nano_case(tokens, rows=3, slots=6)
    plans = [harness.RowPlan(slot, 1010, 1000, 1010 + tokens, tokens) for slot in (0, 1, 2)]
    make = partial(make_ring, torch.Generator().manual_seed(3))
    fresh = harness.poisoned_pools(attributes.pools(BF16, FP32, BF16), plans, 3, make)
    near = harness.to_device(fresh)
    stride = 1 << 30
    far = {
        **near,
        "state": torch.empty(2 * stride + (1 << 20), device="cuda").as_strided(
            near["state"].shape, (stride, *near["state"].stride()[1:])
        ),
    }
    far["state"].copy_(near["state"])
    for name in ("ring_x", "ring_b", "ring_dt"):
        far[name] = near[name].clone(memory_format=torch.preserve_format)
    want = device_step(attributes, 3, tokens, plans, near)()
    got = device_step(attributes, 3, tokens, plans, far)()
    assert torch.equal(got, want) and torch.equal(far["state"], near["state"])


def test_long_runs_do_not_drift():
    """1,024 steps of one token: float32 state, as good as the plain recurrence on the CPU."""
    attributes = Mamba2Attributes(*NANO, 16, 16)
    generator = torch.Generator().manual_seed(5)
    heads, width = attributes.num_heads, NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2]
    pools = {name: pool.allocate(1, "cuda") for name, pool in attributes.pools(BF16, FP32, BF16).items()}
    A_log, dt_bias, D = torch.full((heads,), -4.0), torch.full((heads,), -3.0), torch.ones(heads)
    weights = [w.cuda() for w in (A_log, dt_bias, D)]
    xbc = torch.randn(1, 1024, width, generator=generator).bfloat16()
    dt = torch.randn(1, 1024, heads, generator=generator).bfloat16()
    wide = {name: pool.allocate(1).double() for name, pool in attributes.pools(BF16, FP32, BF16).items()}
    whole = harness.step_tensor([harness.RowPlan(0, 0, 0, 1024, 1024)])
    want = reference.mamba2(attributes, xbc.double(), dt.double(), A_log, dt_bias, D, whole, wide)
    on_gpu, dt_gpu, outputs, folded = xbc.cuda(), dt.cuda(), [], 0
    for i in range(1024):
        fold_to = i + 1 if i + 1 - folded >= 16 else folded
        step = harness.step_tensor([harness.RowPlan(0, i, folded, fold_to, 1)]).cuda()
        token = slice(i, i + 1)
        outputs.append(device.mamba2(attributes, on_gpu[:, token], dt_gpu[:, token], *weights, step, pools))
        folded = fold_to
    assert harness.relative_error(torch.cat(outputs, 1), want) < harness.TOLERANCE[BF16]
    assert harness.relative_error(pools["state"], wide["state"].float()) < 2e-6
