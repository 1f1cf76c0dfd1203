"""``replayssm::gated_delta`` and ``replayssm::kda`` on the GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import harness
import pytest
import torch

from trtllm_replayssm.plugins.device import gated_delta as device_gated_delta
from trtllm_replayssm.plugins.device import kda as device_kda
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.read_copy import FORMATS
from trtllm_replayssm.plugins.reference import delta_rule as reference
from trtllm_replayssm.plugins.reference.read_copy import quantise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (128, 64), (64, 192), (256, 96)]
PLAIN_DIMS = [(16, 16), (24, 40), (100, 128), (128, 72), (160, 64)]
LAYERS = ["gated_delta", "kda", "kda bounded"]


@dataclass(frozen=True)
class Case:
    """A random step of a small layer. decay scales the gates, draft is the most draft tokens of a verify step.

    scale: of activations. beta_shift: of the logits of beta.
    """

    layer: str
    tokens: int
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (2, 4)
    window: int = 16
    draft: int = 0
    activation: torch.dtype = BF16
    state: torch.dtype = FP32
    ring: torch.dtype | None = None
    rows: int = 12
    seed: int = 0
    decay: float = 0.0
    derived: bool = False
    beta_scale: float = 1.0
    scale: float = 1.0
    beta_shift: float = 0.0
    read: str = "same"

    @property
    def attributes(self) -> GatedDeltaAttributes | KdaAttributes:
        window, ring_rows = self.window, self.window + (self.draft + 1 if self.draft else 0)
        if self.layer == "gated_delta":
            heads, dims = self.heads, self.dims
            return GatedDeltaAttributes(*heads, *dims, window, ring_rows, self.beta_scale, self.derived, self.read)
        bound = -5.0 if "bounded" in self.layer else None
        return KdaAttributes(self.heads[1], *self.dims, window, ring_rows, bound, self.derived, self.read)


def make_entry(generator: torch.Generator, decay: float, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name == "ring_beta":
        return torch.rand(shape, generator=generator)
    if name == "ring_g":
        return -torch.rand(shape, generator=generator) * 0.3 * 10**decay
    return torch.randn(shape, generator=generator)


def run_case(
    case: Case,
    tolerances: dict[str, float] | None = None,
    plans: list[harness.RowPlan] | None = None,
    spoilt: bool = False,
    shift: tuple[int, int] = (0, 0),
) -> dict[str, float]:
    """spoilt: rows fold their histories, and tokens of some are no numbers; compares what these must not reach.

    shift: elements by which activations and dt_bias begin off an aligned address.
    """
    attributes, (key_dim, value_dim), value_heads = case.attributes, case.dims, case.heads[1]
    key_heads = case.heads[0] if case.layer == "gated_delta" else value_heads
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    if spoilt:
        plans = harness.flushing_plans(case.tokens, case.window if case.draft else case.window - 1)
        case = replace(case, rows=len(plans))
    plans = plans or harness.random_plans(rng, case.rows, case.tokens, case.window, attributes.ring_rows)
    ring = case.ring or case.activation
    pools = attributes.pools(case.activation, case.state, ring)
    make = partial(make_entry, generator, case.decay)
    pools = harness.poisoned_pools(pools, plans, case.rows + 3, make)
    gates = value_heads * (1 if case.layer == "gated_delta" else key_dim)
    widths = (2 * key_heads * key_dim + value_heads * value_dim, gates, value_heads)
    qkv, gate, b = (torch.randn(case.rows, case.tokens, n, generator=generator) for n in widths)
    inputs = [x.to(case.activation) for x in (qkv * case.scale, gate, b + case.beta_shift)]
    inputs = [(harness.spoil if spoilt else harness.poison_padding)(x, plans) for x in inputs]
    compared = harness.sound_rows(plans) if spoilt else slice(None)
    A_log = torch.rand(value_heads, generator=generator) * 2 - 1 + 2.3 * case.decay
    dt_bias = torch.randn(gates, generator=generator) - 1
    step = harness.step_tensor(plans)
    name = case.layer.split()[0]
    device = {"gated_delta": device_gated_delta.gated_delta, "kda": device_kda.kda}[name]

    def run_reference(p):
        return getattr(reference, name)(attributes, *(x.double() for x in inputs), A_log, dt_bias, step, p)[compared]

    def run_device(p):
        moved = (harness.shifted(x, shift[0]) for x in inputs)
        return device(attributes, *moved, A_log.cuda(), harness.shifted(dt_bias, shift[1]), step.cuda(), p)[compared]

    rings = [name for name in pools if name.startswith("ring_")]
    return harness.compare(run_reference, run_device, pools, tolerances, rings if spoilt else ())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 40])
def test_tokens(layer, tokens):
    run_case(Case(layer, tokens, draft=tokens - 1 if tokens <= 16 else 0, rows=24))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP16), (FP16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_dtypes(layer, tokens, dtypes):
    activation, state = dtypes
    run_case(Case(layer, tokens, draft=4 if tokens == 5 else 0, activation=activation, state=state, rows=24))


@pytest.mark.parametrize("dims", DIMS + PLAIN_DIMS, ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 6, 19])
def test_shapes(layer, tokens, dims):
    run_case(Case(layer, tokens, dims, draft=5 if tokens == 6 else 0))


@pytest.mark.parametrize("dims", [(160, 64), (192, 128), (192, 192), (224, 64), (256, 128)], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [9, 16])
def test_long_verify_steps_of_wide_keys(layer, tokens, dims):
    """Whose x a warp multiplies in groups of tokens, since registers do not hold all."""
    run_case(Case(layer, tokens, dims, draft=tokens - 1))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (1, 4), (3, 6), (2, 16)], ids=str)
def test_head_ratios(heads):
    run_case(Case("gated_delta", 1, heads=heads, beta_scale=2.0))
    run_case(Case("gated_delta", 4, heads=heads, draft=3, beta_scale=2.0))


@pytest.mark.parametrize("window", [1, 4, 16, 24, 32, 64])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_windows(layer, window):
    run_case(Case(layer, 1, window=window, rows=24))
    if window >= 4:
        for state in (FP32, BF16):
            run_case(Case(layer, 4, window=window, draft=3, rows=24, state=state))


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize(("window", "tokens", "history"), [(4, 4, 1), (20, 16, 11)])
def test_a_step_beyond_the_window_that_does_not_fold(layer, window, tokens, history):
    """No cursor of the engine's leads there, but the layer's contract does: the ring has room for the entries."""
    plans = [harness.RowPlan(0, 1000 + history, 1000, 1000, tokens)]
    run_case(Case(layer, tokens, window=window, draft=tokens - 1, rows=1), plans=plans)


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 4, 24])
def test_whole_heads(layer, tokens):
    """A batch that fills the GPU: no head is divided."""
    run_case(Case(layer, tokens, heads=(8, 32), draft=3 if tokens == 4 else 0, rows=20))


@pytest.mark.parametrize("decay", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("layer", LAYERS)
def test_strong_decay(layer, decay):
    """Down to -300 a step: no exponential may overflow, no ratio may be 0/0."""
    for tokens, draft in ((1, 0), (8, 7), (30, 0)):
        run_case(Case(layer, tokens, draft=draft, decay=decay))


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_derived_fold(layer, tokens):
    run_case(Case(layer, tokens, draft=3 if tokens == 4 else 0, derived=True, ring=FP16), {"ring_v": 2e-3})


def test_wide_ring():
    run_case(Case("gated_delta", 4, draft=3, ring=FP32))


@pytest.mark.parametrize("seed", range(8))
def test_random(seed):
    rng = random.Random(seed)
    window, tokens = rng.choice([4, 8, 16, 24, 48]), rng.randint(1, 16)
    draft = tokens - 1 if window >= tokens else 0
    layer, dims, state = rng.choice(LAYERS), rng.choice(DIMS), rng.choice([FP32, BF16, FP16])
    run_case(Case(layer, tokens, dims, window=window, draft=draft, state=state, seed=seed, rows=30))


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_two_heads_a_block(tokens, state):
    """The heads of Qwen3.5-122B, with rows enough that a block takes two of them."""
    run_case(Case("gated_delta", tokens, heads=(16, 64), draft=3 if tokens == 4 else 0, rows=20, state=state))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 40])
def test_read_copies(layer, tokens, read):
    """Outputs from the copy, the checkpoint as it would be without one, and the copy's bits after folds."""
    run_case(Case(layer, tokens, draft=tokens - 1 if tokens <= 16 else 0, rows=24, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("dims", [(64, 64), (96, 192), (256, 96), (128, 40), (160, 24), (160, 64)], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 6, 19])
def test_read_copies_of_other_shapes(layer, tokens, dims, read):
    run_case(Case(layer, tokens, dims, draft=5 if tokens == 6 else 0, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP16), (FP32, FP32)])
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_read_copies_of_other_dtypes(layer, tokens, dtypes, read):
    activation, state = dtypes
    run_case(Case(layer, tokens, draft=4 if tokens == 5 else 0, activation=activation, state=state, rows=24, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("window", [1, 4, 32])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_read_copies_of_other_windows(layer, window, read):
    run_case(Case(layer, 1, window=window, rows=24, read=read))
    if window >= 4:
        run_case(Case(layer, 4, window=window, draft=3, rows=24, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("heads", [(16, 64), (8, 32)], ids=["two heads a block", "whole heads"])
@pytest.mark.parametrize("tokens", [1, 4, 24])
def test_read_copies_of_large_batches(tokens, heads, read):
    for beta_scale in (1.0, 2.0):
        case = Case("gated_delta", tokens, heads=heads, draft=3 if tokens == 4 else 0, rows=20, beta_scale=beta_scale)
        run_case(replace(case, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("decay", [1.0, 3.0])
@pytest.mark.parametrize("layer", LAYERS)
def test_read_copies_under_strong_decay(layer, decay, read):
    for tokens, draft in ((1, 0), (8, 7), (30, 0)):
        run_case(Case(layer, tokens, draft=draft, decay=decay, read=read))


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("activation", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 4])
def test_read_copies_of_hardly_open_gates(layer, tokens, activation, read):
    """What beta leaves of values is below float16's smallest normal number, and the values are large."""
    case = Case(layer, tokens, draft=3, activation=activation, scale=1000.0, beta_shift=-10.0, read=read)
    run_case(case, plans=[harness.RowPlan(n, 0, 0, 0, min(tokens, n + 1)) for n in range(12)])


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_a_copy_leaves_the_checkpoint_alone(layer, read):
    """8,192 tokens in verify steps of which a random part is kept: rounded reads never reach the checkpoint."""
    rng, length = random.Random(5), 8192
    whole = harness.RowPlan(0, 0, 0, 0, 4)
    *inputs, A_log, dt_bias, _ = Steps(Case(layer, length, heads=(1, 2)), [whole], 1).inputs
    name = layer.split()[0]
    device = {"gated_delta": device_gated_delta.gated_delta, "kda": device_kda.kda}[name]
    layers = [Case(layer, 4, heads=(1, 2), draft=3, read=kind).attributes for kind in ("same", read)]
    pools = [{n: p.allocate(1, "cuda") for n, p in a.pools(BF16, FP32, BF16).items()} for a in layers]
    committed, folded, folds = 0, 0, 0
    while committed + 4 <= length:
        fold_to = committed if committed - folded + 4 > 16 else folded
        plan = harness.step_tensor([harness.RowPlan(0, committed, folded, fold_to, 4)]).cuda()
        tokens = [x[:, committed : committed + 4] for x in inputs]
        for attributes, bound in zip(layers, pools, strict=True):
            device(attributes, *tokens, A_log - 4, dt_bias, plan, bound)
        if fold_to > folded:
            folds += 1
            assert torch.equal(pools[0]["state"], pools[1]["state"])
            for n, want in quantise(pools[1]["state"].cpu(), read).items():
                assert torch.equal(pools[1][n].cpu().view(torch.uint8), want.view(torch.uint8))
        committed, folded = committed + rng.randint(1, 4), fold_to
    assert folds > length // 16


@pytest.mark.parametrize("shift", [(4, 0), (0, 1)], ids=["activations", "dt_bias"])
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (1, 16), (4, 16), (40, 16)])
def test_inputs_that_no_vector_may_start_at(layer, tokens, window, shift):
    run_case(Case(layer, tokens, window=window, draft=3 if tokens == 4 else 0), shift=shift)


@pytest.mark.parametrize("read", ["same", *FORMATS])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("tokens", [1, 4, 9, 20])
def test_tokens_that_are_no_numbers_leave_the_checkpoint_alone(layer, tokens, dtype, read):
    """Before they are folded: drafts may be dropped. Nor do they reach other rows."""
    case = Case(layer, tokens, (64, 64), (1, 2), draft=tokens - 1, activation=dtype, read=read)
    run_case(case, spoilt=True)


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_short_last_chunk(layer):
    """Rows of 1 to 16 tokens in a launch for longer chunks, behind rings of every length."""
    plans = [harness.RowPlan(n, 1000 + n, 1000, 1001 + 2 * n, n + 1) for n in range(16)]
    run_case(Case(layer, 40, rows=16), plans=plans)


class Steps:
    """One layer's step on the GPU, from the same contents of its pools every time. Attributes: of ``case``."""

    def __init__(self, case: Case, plans: list[harness.RowPlan], slots: int) -> None:
        self.attributes, name = case.attributes, case.layer.split()[0]
        generator = torch.Generator().manual_seed(3)
        make = partial(make_entry, generator, case.decay)
        described = self.attributes.pools(case.activation, case.state, case.activation)
        self.pools = harness.to_device(harness.poisoned_pools(described, plans, slots, make))
        value_heads, (key_dim, value_dim) = case.heads[1], case.dims
        key_heads = case.heads[0] if name == "gated_delta" else value_heads
        gates = value_heads * (1 if name == "gated_delta" else key_dim)
        widths = (2 * key_heads * key_dim + value_heads * value_dim, gates, value_heads)
        rows = len(plans)
        inputs = [torch.randn(rows, case.tokens, n, generator=generator).to(case.activation).cuda() for n in widths]
        weights = [torch.rand(value_heads, generator=generator).cuda(), torch.randn(gates, generator=generator).cuda()]
        self.inputs = (*inputs, *weights, harness.step_tensor(plans).cuda())
        self.device = {"gated_delta": device_gated_delta.gated_delta, "kda": device_kda.kda}[name]

    def run(self, pools: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.device(self.attributes, *self.inputs, pools)


@pytest.mark.parametrize("read", ["same", *FORMATS])
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_repeats_and_graph_replay_are_bit_identical(layer, tokens, read):
    case = Case(layer, tokens, draft=3 if tokens == 4 else 0, rows=12, read=read)
    plans = harness.random_plans(random.Random(3), 12, tokens, 16, case.attributes.ring_rows)
    steps = Steps(case, plans, 15)
    pools = {name: pool.clone(memory_format=torch.preserve_format) for name, pool in steps.pools.items()}

    def restored(step):
        for name, pool in steps.pools.items():
            pools[name].copy_(pool)
        return [x.nan_to_num(7) for x in (step(), *pools.values())]

    first = restored(lambda: steps.run(pools))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps.run(pools)

    def replay():
        graph.replay()
        return captured

    for step in [lambda: steps.run(pools)] * 500 + [replay] * 500:
        assert all(map(torch.equal, restored(step), first))


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_results_do_not_depend_on_the_slot(layer, tokens):
    """Slots more than 2^31 elements into a pool give the same bits as near ones."""
    plans = [harness.RowPlan(slot, 1010, 1000, 1010 + tokens, tokens) for slot in range(3)]
    steps = Steps(Case(layer, tokens), plans, 3)
    near = steps.pools
    far = {name: pool.clone(memory_format=torch.preserve_format) for name, pool in near.items()}
    stride = 1 << 30
    storage = torch.empty(2 * stride + near["state"][0].numel(), device="cuda")
    far["state"] = storage.as_strided(near["state"].shape, (stride, *near["state"].stride()[1:]))
    far["state"].copy_(near["state"])
    assert torch.equal(steps.run(far), steps.run(near))
    assert torch.equal(far["state"], near["state"])


@pytest.mark.parametrize("layer", LAYERS[:2])
def test_long_runs_do_not_drift(layer):
    """8,192 tokens decoded one by one, with a window and as the ordinary recurrence: nothing but float32's rounding adds up."""
    length = 8192
    whole = harness.RowPlan(0, 0, 0, length, length)
    *inputs, A_log, dt_bias, plan = Steps(Case(layer, length, heads=(1, 2)), [whole], 1).inputs
    weights = A_log - 4, dt_bias  # a token decays by a few percent
    name = layer.split()[0]
    device = {"gated_delta": device_gated_delta.gated_delta, "kda": device_kda.kda}[name]

    def allocate(window, wide):
        attributes = Case(layer, 1, heads=(1, 2), window=window).attributes
        pools = {n: p.allocate(1, "cuda") for n, p in attributes.pools(BF16, FP32, BF16).items()}
        return attributes, {n: p.double() for n, p in pools.items()} if wide else pools

    attributes, exact = allocate(16, True)
    want = getattr(reference, name)(attributes, *(x.double() for x in inputs), *weights, plan, exact)

    def errors(window):
        attributes, pools = allocate(window, False)
        folded, outputs, plans = 0, [], []
        for i in range(length):
            fold_to = i + 1 if i + 1 - folded >= window else folded
            plans.append(harness.step_tensor([harness.RowPlan(0, i, folded, fold_to, 1)]))
            folded = fold_to
        for i, plan in enumerate(torch.stack(plans).cuda()):
            token = [x[:, i : i + 1] for x in inputs]
            outputs.append(device(attributes, *token, *weights, plan, pools))
        return harness.relative_error(torch.cat(outputs, 1), want), harness.relative_error(
            pools["state"], exact["state"]
        )

    plain, replayed = errors(1), errors(16)
    assert max(plain[0], replayed[0]) < harness.TOLERANCE[BF16]
    assert max(plain[1], replayed[1]) < 1e-6, f"replayed {replayed}, plain {plain}"
