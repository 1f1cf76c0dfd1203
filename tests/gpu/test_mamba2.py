"""``replayssm::mamba2`` on the GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import harness
import pytest
import torch

from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference import mamba2 as reference
from trtllm_replayssm.plugins.reference.read_copy import quantise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: heads, head_dim, state_size, groups
NANO = (16, 64, 128, 2)
SHAPES = [NANO, (8, 32, 64, 1), (8, 80, 128, 8), (4, 128, 128, 2), (4, 64, 256, 2), (4, 128, 64, 1), (3, 24, 40, 3)]


def make_ring(generator: torch.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name == "ring_dt":
        return torch.rand(shape, generator=generator) * 0.5
    return torch.randn(shape, generator=generator)


def run_case(
    shape,
    tokens,
    window,
    dtypes,
    rows=24,
    seed=0,
    decay=1.0,
    draft=0,
    read_dtype="same",
    spoilt=False,
    shift=0,
    lost=False,
):
    """spoilt: rows fold their histories, and tokens of some are no numbers; compares what these must not reach.

    shift: elements by which activations begin off an aligned address. lost: the time step of one head is no number in the first
    token of every third row.
    """
    activation, state = dtypes
    heads, head_dim, state_size, groups = shape
    ring_rows = window + (draft + 1 if draft else 0)
    limits = (0.001, 100.0)
    attributes = Mamba2Attributes(*shape, window, ring_rows, *limits, read_dtype=read_dtype)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    plans = harness.random_plans(rng, rows, tokens, window, ring_rows)
    if spoilt:
        plans = harness.flushing_plans(tokens, window if draft else window - 1)
        rows = len(plans)
    pools = attributes.pools(activation, state, activation)
    pools = harness.poisoned_pools(pools, plans, rows + 3, partial(make_ring, generator))
    width = heads * head_dim + 2 * groups * state_size
    # Slices of one wider tensor, as the input projection leaves them.
    wide = torch.randn(rows, tokens, width + -(-heads // 8) * 8 + 5 * 16, generator=generator).to(activation)
    wide = harness.spoil(wide, plans) if spoilt else harness.poison_padding(wide, plans)
    if lost:
        wide[::3, 0, width + 1] = float("nan")
    compared = harness.sound_rows(plans) if spoilt else slice(None)
    A_log = (torch.rand(heads, generator=generator) * 4 - 2) * decay
    dt_bias, D = (torch.randn(heads, generator=generator) for _ in range(2))
    step = harness.step_tensor(plans)

    def parts(x):
        return x[..., :width], x[..., width : width + heads]

    def run_reference(p):
        return reference.mamba2(attributes, *parts(wide.double()), A_log, dt_bias, D, step, p)[compared]

    def run_device(p):
        weights = (w.cuda() for w in (A_log, dt_bias, D))
        return device.mamba2(attributes, *parts(harness.shifted(wide, shift)), *weights, step.cuda(), p)[compared]

    rings = [name for name in pools if name.startswith("ring_")]
    return harness.compare(run_reference, run_device, pools, ignored=rings if spoilt else ())


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 40])
def test_dtypes(tokens, dtypes):
    run_case(NANO, tokens, 16, dtypes, draft=3 if tokens == 4 else 15 if tokens == 16 else 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_shapes(shape, tokens):
    run_case(shape, tokens, 16, (BF16, FP32), draft=7 if tokens == 8 else 0)


@pytest.mark.parametrize("read_dtype", ["same", "nvfp4"])
@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (1, 16), (4, 16), (40, 16)])
def test_activations_that_no_vector_may_start_at(tokens, window, read_dtype):
    run_case(
        (4, 64, 128, 2), tokens, window, (BF16, FP32), draft=3 if tokens == 4 else 0, read_dtype=read_dtype, shift=4
    )


@pytest.mark.parametrize("read_dtype", ["same", "nvfp4"])
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP16, FP16), (FP32, FP32)])
@pytest.mark.parametrize("tokens", [1, 4, 9, 20])
def test_tokens_that_are_no_numbers_leave_the_checkpoint_alone(tokens, dtypes, read_dtype):
    """Before they are folded: drafts may be dropped. Nor do they reach other rows."""
    run_case((4, 64, 128, 2), tokens, 16, dtypes, draft=tokens - 1, read_dtype=read_dtype, spoilt=True)


@pytest.mark.parametrize(
    ("shape", "tokens", "window"),
    [
        ((4, 64, 128, 2), 1, 1),
        ((4, 64, 128, 2), 1, 16),
        ((4, 64, 128, 2), 4, 16),
        ((4, 64, 128, 2), 33, 16),
        ((3, 24, 40, 3), 2, 8),
    ],
    ids=str,
)
def test_time_steps_that_are_no_numbers_are_not_hidden(shape, tokens, window):
    """By their bounds: the outputs and the state of that head are no numbers either, and those of others are."""
    run_case(shape, tokens, window, (BF16, FP32), draft=tokens - 1 if 1 < tokens < window else 0, lost=True)


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


def device_step(attributes, rows, tokens, plans, pools, seed=0, activation=BF16):
    """A function that runs one step on ``pools`` and returns y."""
    generator = torch.Generator().manual_seed(seed)
    a = attributes
    width = a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size
    xbc = torch.randn(rows, tokens, width, generator=generator).to(activation).cuda()
    dt = torch.randn(rows, tokens, a.num_heads, generator=generator).to(activation).cuda()
    A_log, dt_bias, D = (torch.randn(a.num_heads, generator=generator).cuda() for _ in range(3))
    step = harness.step_tensor(plans).cuda()

    def run():
        return device.mamba2(a, xbc, dt, A_log, dt_bias, D, step, pools)

    return run


def nano_case(tokens, rows=16, slots=20, read_dtype="same"):
    attributes = Mamba2Attributes(*NANO, 16, 16 + (tokens if 1 < tokens <= 16 else 0), read_dtype=read_dtype)
    plans = harness.random_plans(random.Random(3), rows, tokens, 16, attributes.ring_rows)
    make = partial(make_ring, torch.Generator().manual_seed(3))
    pools = harness.poisoned_pools(attributes.pools(BF16, FP32, BF16), plans, slots, make)
    return attributes, plans, pools


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (BF16, FP16), (FP16, FP16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("shape", [(4, 64, 128, 2), (1, 80, 64, 1), (3, 48, 32, 1)], ids=str)
def test_a_row_has_the_same_bits_in_small_and_large_batches(shape, dtypes, stochastic, monkeypatch):
    """Warps that work alone, as in small batches, make the same numbers as those of a block together."""
    activation, state = dtypes
    attributes = Mamba2Attributes(*shape, 16, 16, stochastic_rounding=stochastic and state != FP32)
    plans = harness.random_plans(random.Random(11), 24, 1, 16, 16)
    make = partial(make_ring, torch.Generator().manual_seed(3))
    fresh = harness.poisoned_pools(attributes.pools(activation, state, activation), plans, 27, make)
    results = []
    for entries, symbol in ((16, "mamba2_single"), (0, "mamba2_step")):
        monkeypatch.setattr(device, "SINGLE_ENTRIES", entries)
        record = device.launch_record(attributes, activation, state, activation, 24, 1, (8,) * 6)
        assert record.kernel.symbol == symbol
        pools = harness.to_device(fresh)
        y = device_step(attributes, 24, 1, plans, pools, activation=activation)()
        results.append({"y": y} | pools)
    alone, together = results
    for name, got in alone.items():
        assert torch.equal(got.nan_to_num(7), together[name].nan_to_num(7)), name


@pytest.mark.parametrize(
    ("tokens", "read_dtype"),
    [(1, "same"), (8, "same"), (50, "same"), (1, "fp8"), (8, "fp8"), (1, "nvfp4"), (8, "nvfp4"), (50, "nvfp4")],
)
def test_repeats_and_graph_replay_are_bit_identical(tokens, read_dtype):
    attributes, plans, fresh = nano_case(tokens, read_dtype=read_dtype)
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

    for step in [run] * 500 + [replay] * 500:
        again, now = restored(step)
        assert torch.equal(again.nan_to_num(7), first.nan_to_num(7))
        assert all(torch.equal(now[name].nan_to_num(7), pool.nan_to_num(7)) for name, pool in state.items())


@pytest.mark.parametrize(("tokens", "read_dtype"), [(1, "same"), (50, "same"), (1, "fp8"), (1, "nvfp4")])
def test_results_do_not_depend_on_the_slot(tokens, read_dtype):
    """Slots more than 2^31 elements into a pool give the same bits as near ones."""
    attributes, _, _ = nano_case(tokens, rows=3, slots=6, read_dtype=read_dtype)
    plans = [harness.RowPlan(slot, 1010, 1000, 1010 + tokens, tokens) for slot in (0, 1, 2)]
    make = partial(make_ring, torch.Generator().manual_seed(3))
    fresh = harness.poisoned_pools(attributes.pools(BF16, FP32, BF16), plans, 3, make)
    near = harness.to_device(fresh)
    far = {name: pool.clone(memory_format=torch.preserve_format) for name, pool in near.items()}
    stride = 1 << 30
    for name in {"state", "read_codes"} & near.keys():
        flat = torch.empty(2 * stride + (1 << 20), dtype=near[name].dtype, device="cuda")
        far[name] = flat.as_strided(near[name].shape, (stride, *near[name].stride()[1:]))
        far[name].copy_(near[name])
    want = device_step(attributes, 3, tokens, plans, near)()
    got = device_step(attributes, 3, tokens, plans, far)()
    assert torch.equal(got, want)
    assert all(torch.equal(far[name].nan_to_num(7), pool.nan_to_num(7)) for name, pool in near.items())


class LongRun:
    """A request of 8,192 tokens of one layer with slow decays, and its float64 recurrence.

    mean: of the activations, which vary by ``spread``; dt_bias: sets the size of a token's step.
    """

    TOKENS = 8192

    def __init__(self, mean: float, spread: float, dt_bias: float) -> None:
        generator = torch.Generator().manual_seed(5)
        heads, width = NANO[0], NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2]
        self.weights = [torch.full((heads,), value, device="cuda") for value in (-4.0, dt_bias, 1.0)]
        self.xbc = (mean + spread * torch.randn(1, self.TOKENS, width, generator=generator)).bfloat16().cuda()
        self.dt = (spread * torch.randn(1, self.TOKENS, heads, generator=generator)).bfloat16().cuda()
        attributes = Mamba2Attributes(*NANO, 16, 16)
        pools = {name: p.allocate(1, "cuda").double() for name, p in attributes.pools(BF16, FP32, BF16).items()}
        whole = harness.step_tensor([harness.RowPlan(0, 0, 0, self.TOKENS, self.TOKENS)]).cuda()
        self.want = reference.mamba2(attributes, self.xbc.double(), self.dt.double(), *self.weights, whole, pools)
        self.state = pools["state"]

    def errors(self, window: int, state: torch.dtype, stochastic: bool = False) -> tuple[float, float]:
        """Of the outputs and of the last state, when the request is decoded token by token."""
        attributes = Mamba2Attributes(*NANO, window, window, stochastic_rounding=stochastic)
        pools = {name: pool.allocate(1, "cuda") for name, pool in attributes.pools(BF16, state, BF16).items()}
        folded, plans = 0, []
        for i in range(self.TOKENS):
            fold_to = i + 1 if i + 1 - folded >= window else folded
            plans.append(harness.step_tensor([harness.RowPlan(0, i, folded, fold_to, 1)]))
            folded = fold_to
        outputs = []
        for i, plan in enumerate(torch.stack(plans).cuda()):
            token = slice(i, i + 1)
            parts = self.xbc[:, token], self.dt[:, token]
            outputs.append(device.mamba2(attributes, *parts, *self.weights, plan, pools))
        error = harness.relative_error
        return error(torch.cat(outputs, 1), self.want), error(pools["state"], self.state)


@pytest.fixture(scope="module")
def long_run():
    return LongRun(mean=0.0, spread=1.0, dt_bias=-3.0)


def test_long_runs_do_not_drift(long_run):
    """With a float32 state nothing adds up but the rounding of float32."""
    outputs, state = long_run.errors(16, FP32)
    assert outputs < harness.TOLERANCE[BF16]
    assert state < 2e-6


@pytest.mark.parametrize("state", [BF16, FP16], ids=str)
def test_a_ring_rounds_a_narrow_state_less_often(long_run, state):
    """A 16-bit state is rounded once a window instead of at every token, and drifts less for it."""
    plain, replayed = long_run.errors(1, state), long_run.errors(16, state)
    assert replayed[0] < plain[0] and replayed[1] < plain[1]


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def test_small_updates_are_not_lost():
    """Updates smaller than the state's spacing: rounded to the nearest it stands still, at random it follows."""
    slow = LongRun(mean=1.0, spread=0.1, dt_bias=-5.5)
    nearest, rounded = slow.errors(16, BF16), slow.errors(16, BF16, stochastic=True)
    assert rounded[0] < nearest[0] / 4 and rounded[1] < nearest[1] / 4


class Folds:
    """Rows that all fold, whose states are rounded; seeds by row."""

    def __init__(self, tokens: int, activation: torch.dtype, state: torch.dtype, slots: list[int]) -> None:
        draft = tokens - 1 if 1 < tokens <= 16 else 0
        rows = 16 + (draft + 1 if draft else 0)
        self.attributes = Mamba2Attributes(*NANO, 16, rows, stochastic_rounding=True)
        generator = torch.Generator().manual_seed(7)
        committed = 1015
        fold_to = committed if draft else committed + tokens
        self.plans = [harness.RowPlan(slot, committed, 1000, fold_to, tokens) for slot in slots]
        by_row = [harness.RowPlan(row, committed, 1000, fold_to, tokens) for row in range(len(slots))]
        described = self.attributes.pools(activation, state, activation)
        made = harness.poisoned_pools(described, by_row, len(slots), partial(make_ring, generator))
        self.pools = {name: pool.allocate(max(slots) + 1) for name, pool in described.items()}
        for name, pool in self.pools.items():
            pool[slots] = made[name]
        width, heads = NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2], NANO[0]
        self.xbc = torch.randn(len(slots), tokens, width, generator=generator).to(activation)
        self.dt = torch.randn(len(slots), tokens, heads, generator=generator).to(activation)
        self.weights = [torch.randn(heads, generator=generator) for _ in range(3)]
        self.step = harness.step_tensor(self.plans)
        self.step[:, Step.SEED] = torch.arange(len(slots), dtype=torch.int32) - 1
        self.slots = slots

    def states(self, run, device: str) -> torch.Tensor:
        """States of the rows after the step, on the CPU."""
        pools = harness.to_device(self.pools) if device == "cuda" else {n: p.clone() for n, p in self.pools.items()}
        inputs = (x.to(device) for x in (self.xbc, self.dt, *self.weights, self.step))
        run(self.attributes, *inputs, pools)
        return pools["state"][self.slots].cpu()


@pytest.mark.parametrize("state", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("tokens", "activation"), [(1, BF16), (4, BF16), (40, BF16), (1, FP32), (40, FP32)], ids=str)
def test_stochastic_rounding_takes_the_bits_of_the_contract(tokens, activation, state):
    """Nearly all elements equal the reference's; where sums before the rounding differ, the neighbour is as good."""
    case = Folds(tokens, activation, state, [0, 1, 2])
    got, want = case.states(device.mamba2, "cuda"), case.states(reference.mamba2, "cpu")
    assert (got == want).double().mean() > 0.99
    assert harness.relative_error(got, want) < harness.TOLERANCE[state]
    plain = replace(case.attributes, stochastic_rounding=False)
    case.attributes = plain
    assert (got == case.states(device.mamba2, "cuda")).double().mean() < 0.8, "nothing was rounded at random"


@pytest.mark.parametrize("tokens", [1, 40])
def test_stochastic_rounding_does_not_depend_on_the_slot(tokens):
    near, far = (Folds(tokens, BF16, BF16, slots).states(device.mamba2, "cuda") for slots in ([0, 1, 2], [5, 2, 9]))
    assert torch.equal(near, far)


# ---- read copies -----------------------------------------------------------------------------------------------------

both_formats = pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])


@both_formats
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 16, 40])
def test_copies(tokens, dtypes, read_dtype):
    """Outputs come from the copy, also of rows that fold; the copy that a fold leaves has the bits of the definition."""
    run_case(NANO, tokens, 16, dtypes, draft=3 if tokens == 4 else 15 if tokens == 16 else 0, read_dtype=read_dtype)


@both_formats
@pytest.mark.parametrize("shape", [*SHAPES[1:-1], (4, 48, 32, 2), (3, 24, 96, 3)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_copies_of_other_shapes(shape, tokens, read_dtype):
    run_case(shape, tokens, 16, (BF16, FP32), draft=2 if tokens == 3 else 0, read_dtype=read_dtype)


@both_formats
@pytest.mark.parametrize("window", [1, 4, 32, 64])
def test_copies_in_other_windows(window, read_dtype):
    run_case(NANO, 1, window, (BF16, FP32), read_dtype=read_dtype, rows=40)


@pytest.mark.parametrize("read_dtype", ["same", "fp8", "nvfp4"])
def test_blocks_of_several_heads(read_dtype):
    """Enough rows that a block takes all heads of a group."""
    run_case((16, 64, 128, 2), 1, 16, (BF16, FP32), rows=130, read_dtype=read_dtype)
    run_case((16, 64, 128, 2), 4, 16, (BF16, BF16), rows=130, draft=3, read_dtype=read_dtype)


class Verified:
    """A request whose verify steps of four tokens keep some at random: its state at the end, and all outputs."""

    TOKENS, T = 8192, 4

    def __init__(self, read_dtype: str, state: torch.dtype = FP32, stochastic: bool = False) -> None:
        generator, rng = torch.Generator("cuda").manual_seed(9), random.Random(9)
        a = Mamba2Attributes(*NANO, 16, 16 + self.T, stochastic_rounding=stochastic, read_dtype=read_dtype)
        self.pools = {name: pool.allocate(1, "cuda") for name, pool in a.pools(BF16, state, BF16).items()}
        width, heads = NANO[0] * NANO[1] + 2 * NANO[3] * NANO[2], NANO[0]
        xbc = torch.randn(1, self.TOKENS + self.T, width, generator=generator, device="cuda").bfloat16()
        dt = torch.randn(1, self.TOKENS + self.T, heads, generator=generator, device="cuda").bfloat16()
        # Slow decays: the state outlives thousands of tokens.
        weights = [torch.full((heads,), value, device="cuda") for value in (-4.0, -3.0, 1.0)]
        committed, folded, plans, kept = 0, 0, [], []
        while committed < self.TOKENS:
            fold_to = committed if committed - folded + self.T > 16 else folded
            plans.append(harness.step_tensor([harness.RowPlan(0, committed, folded, fold_to, self.T)]))
            kept.append((committed, rng.randint(1, self.T)))
            folded, committed = fold_to, committed + kept[-1][1]
        outputs = []
        for plan, (at, accepted) in zip(torch.stack(plans).cuda(), kept, strict=True):
            token = slice(at, at + self.T)
            y = device.mamba2(a, xbc[:, token], dt[:, token], *weights, plan, self.pools)
            outputs.append(y[0, :accepted])
        self.outputs = torch.cat(outputs).float()


@both_formats
@pytest.mark.parametrize(("state", "stochastic"), [(FP32, False), (BF16, False), (BF16, True)], ids=str)
def test_a_copy_leaves_the_checkpoint_alone(state, stochastic, read_dtype):
    """After 8,192 tokens the checkpoint has the bits of a layer without a copy, and the copy those of the definition."""
    plain, copied = Verified("same", state, stochastic), Verified(read_dtype, state, stochastic)
    assert torch.equal(copied.pools["state"], plain.pools["state"])
    for name, expected in quantise(copied.pools["state"].cpu(), read_dtype).items():
        assert torch.equal(copied.pools[name].cpu(), expected), name


@pytest.mark.parametrize(("read_dtype", "largest"), [("fp8", 4e-2), ("nvfp4", 0.16)])
def test_errors_of_a_copy_do_not_grow(read_dtype, largest):
    """Rounding never reaches the checkpoint, so that late outputs are as near as early ones."""
    exact, copied = Verified("same").outputs, Verified(read_dtype).outputs
    quarters = zip(copied.chunk(4), exact.chunk(4), strict=True)
    errors = [harness.relative_error(*quarter) for quarter in quarters]
    assert all(0 < error < largest for error in errors), errors
    assert errors[-1] < 1.2 * errors[1], errors
