"""The embedded engine's own kernels (norms, gates, rotation, cache, attention, experts) against float64 torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import TOLERANCE, RowPlan, relative_error, step_tensor
from torch import Tensor

from trtllm_replayssm.network.cuda_backend import wide_linear
from trtllm_replayssm.plugins.device import attention, elementwise, experts, linear, norms

NAN = float("nan")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


# ---- norms and gates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "groups"), [(2688, 1), (4096, 8), (33, 1), (130, 2), (8192, 1)])
@pytest.mark.parametrize("mode", norms.MODES)
def test_rms_norm(dtype, width, groups, mode):
    tokens, epsilon = 19, 1e-5
    wide = randn(tokens, 2 * width + 8, dtype=dtype, seed=1)
    x, y = wide[:, :width], wide[:, width : 2 * width]  # slices of wider tokens
    weight, zero_centred = randn(width, dtype=dtype, seed=2), mode == "sum"
    second = None if mode == "plain" else y
    out, total = norms.rms_norm(
        x, weight, epsilon, dtype, second, mode, groups, zero_centred, sigmoid=mode == "gate_after"
    )
    a, b = x.double(), y.double()
    if mode == "sum":
        assert torch.equal(total, x + y)
        a = (x + y).double()
    if mode == "gate_before":
        a = a * F.silu(b)
    parts = a.unflatten(1, (groups, -1))
    want = (parts * (parts.square().mean(-1, keepdim=True) + epsilon).rsqrt()).flatten(1) * (
        weight.double() + zero_centred
    )
    if mode == "gate_after":
        want = want * b.sigmoid()
    assert relative_error(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [128, 512, 96])
def test_one_weight_serves_every_head(width):
    x, z, weight = randn(9, 4 * width), randn(9, 4 * width, seed=1), randn(width, seed=2)
    out, _ = norms.rms_norm(x, weight, 1e-6, x.dtype, z, "gate_after", groups=4)
    heads = x.double().unflatten(1, (4, width))
    normed = heads * (heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert relative_error(out, normed.flatten(1) * F.silu(z.double())) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1856, 7])
def test_gates(dtype, width):
    wide = randn(5, 2 * width, dtype=dtype)
    x, gate = wide[:, :width], wide[:, width:]
    assert relative_error(elementwise.gated(x, gate, False), x.double() * F.silu(gate.double())) < TOLERANCE[dtype]
    assert relative_error(elementwise.gated(x, gate, True), x.double() * gate.double().sigmoid()) < TOLERANCE[dtype]
    assert relative_error(elementwise.relu2(x), F.relu(x.double()).square()) < TOLERANCE[dtype]
    x[1, 3], gate[2, 4] = NAN, NAN
    gated, squared = elementwise.gated(x, gate, False), elementwise.relu2(x)
    assert gated.isnan().nonzero().tolist() == [[1, 3], [2, 4]] and squared.isnan().nonzero().tolist() == [[1, 3]]


# ---- linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize(("width", "outputs"), [(256, 1037), (4, 1), (1000, 7), (4096, 272)])
@pytest.mark.parametrize("biased", [False, True])
def test_row_linear(rows, width, outputs, biased):
    x = randn(rows, width + 8, dtype=torch.float32, seed=1)[:, 4:-4]  # slices of wider tokens
    weight, bias = (randn(*shape, dtype=torch.float32, seed=2) for shape in ((outputs, width), (outputs,)))
    given = bias if biased else None
    assert linear.suited(x, weight, given)
    out = linear.row_linear(x, weight, given)
    want = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert relative_error(out, want) < TOLERANCE[torch.float32]


def test_what_row_linear_does_not_take():
    x, weight = (randn(*shape, dtype=torch.float32) for shape in ((16, 64), (8, 64)))
    assert linear.suited(x, weight, None)
    assert not linear.suited(x.bfloat16(), weight, None) and not linear.suited(x, weight.half(), None)
    assert not linear.suited(x, weight, weight[0].half())
    assert not linear.suited(torch.cat((x, x)), weight, None) and not linear.suited(x[:0], weight, None)
    assert not linear.suited(x[:, :63], weight[:, :63].contiguous(), None)
    assert not linear.suited(x[:, 1:61], weight[:, :60].contiguous(), None)
    assert not linear.suited(x.t()[:16, :8], weight[:, :8].contiguous(), None)
    assert not linear.suited(x[:, :32], weight[:, :32], None)
    assert not linear.suited(x, weight[:, :32].contiguous(), None)
    assert not linear.suited(x.view(8, 128), weight, None)


# ---- attention -------------------------------------------------------------------------------------------------------


def plans_of(rng: random.Random, rows: int, tokens: int, positions: int) -> list[RowPlan]:
    """Rows in any order of slots, from empty caches to full ones; the second is padding."""
    slots, plans = rng.sample(range(rows + 2), rows), []
    for row, slot in enumerate(slots):
        length = rng.randint(1, tokens)
        committed = [0, 0, positions - length, rng.randint(0, positions - length)][min(row, 3)]
        plans.append(RowPlan(-1, 0, 0, 0, 0) if row == 1 else RowPlan(slot, committed, 0, 0, length))
    return plans


def attend(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float, window: int | None) -> Tensor:
    """One row in float64: q ``[T, H, D]`` against its slot's caches ``[Hkv, positions, D]``."""
    tokens, heads = q.shape[:2]
    out = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.float64, device=q.device)
    for i in range(plan.query_len):
        first = 0 if window is None else max(0, plan.committed + i + 1 - window)
        seen = slice(first, plan.committed + i + 1)
        for h in range(heads):
            kv = h // (heads // k.shape[0])
            weights = (k[kv, seen].double() @ q[i, h].double() * scale).softmax(0)
            out[i, h] = weights @ v[kv, seen].double()
    return out


SHAPES = {
    "nano": attention.AttentionShape(32, 2, 128, 128, 128**-0.5),
    "qwen": attention.AttentionShape(16, 2, 256, 256, 256**-0.5),
    "many": attention.AttentionShape(6, 3, 64, 64, 0.125),
    "latent": attention.AttentionShape(16, 1, 576, 512, 192**-0.5),
    "sliding": attention.AttentionShape(8, 2, 96, 192, 0.1, 37),
    "small_latent": attention.AttentionShape(4, 1, 80, 64, 0.125, wide=True),
}
DTYPES_OF_SHAPES = [
    (name, dtype) for name in SHAPES for dtype in FLOATS if dtype == torch.float32 or not SHAPES[name].wide
]


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize(("name", "dtype"), DTYPES_OF_SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "positions"), [(5, 150), (2, 700)])
def test_decode_attention(dtype, tokens, name, rows, positions):
    shape, rng = replace(SHAPES[name], wide=dtype == torch.float32), random.Random(tokens * 100 + rows)
    assert shape.suited
    plans = plans_of(rng, rows, tokens, positions)
    slots = rows + 2
    cache = torch.full((slots, shape.kv_heads, positions, shape.width), NAN, dtype=dtype, device="cuda")
    shared = shape.value_width < shape.width  # latent attention: values are the keys' first channels
    values = torch.full((slots, shape.kv_heads, positions, shape.value_width), NAN, dtype=dtype, device="cuda")
    for plan in plans:
        if plan.slot >= 0:
            end = plan.committed + plan.query_len
            cache[plan.slot, :, :end] = randn(shape.kv_heads, end, shape.width, dtype=dtype, seed=plan.slot)
            values[plan.slot, :, :end] = randn(shape.kv_heads, end, shape.value_width, dtype=dtype, seed=99 + plan.slot)
    v = cache[..., : shape.value_width] if shared else values
    q = randn(rows, tokens, shape.heads * shape.width + 64, dtype=dtype, seed=5)[..., : shape.heads * shape.width]
    q = q.unflatten(2, (shape.heads, shape.width))
    step = step_tensor(plans).cuda()
    out = attention.decode_attention(shape, q, cache, v, step, positions)
    for row, plan in enumerate(plans):
        if plan.slot < 0:
            assert (out[row] == 0).all()
            continue
        valid = slice(0, plan.query_len)
        want = attend(q[row], cache[plan.slot], v[plan.slot], plan, shape.scale, shape.window)
        assert relative_error(out[row, valid], want[valid]) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(2, 128), (1, 576), (3, 5)])
def test_cache_update_writes_valid_tokens_and_nothing_else(dtype, heads, width):
    rows, tokens, positions = 6, 5, 40
    plans = plans_of(random.Random(3), rows, tokens, positions)
    cache = randn(rows + 2, heads, positions, width, dtype=dtype, seed=1)
    x = randn(rows, tokens, heads * width + 16, dtype=dtype, seed=2)[..., : heads * width].unflatten(2, (heads, width))
    want = cache.clone()
    for row, plan in enumerate(plans):
        if plan.slot >= 0:
            for i in range(plan.query_len):
                want[plan.slot, :, plan.committed + i] = x[row, i]
    attention.cache_update(cache, x, step_tensor(plans).cuda())
    assert torch.equal(cache, want)


def test_cache_update_of_blocks():
    """One position of the cache for every third token, written by the token that ends it."""
    plans = [RowPlan(1, 4, 0, 0, 5), RowPlan(-1, 0, 0, 0, 0), RowPlan(0, 0, 0, 0, 2), RowPlan(2, 11, 0, 0, 3)]
    cache, x = randn(3, 1, 5, 16, seed=1), randn(4, 5, 1, 16, seed=2)
    want = cache.clone()
    want[1, 0, 1], want[1, 0, 2], want[2, 0, 3] = x[0, 1, 0], x[0, 4, 0], x[3, 0, 0]
    attention.cache_update(cache, x, step_tensor(plans).cuda(), 3)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "dim"), [(256, 64), (64, 64)])
def test_rope(interleaved, width, dim):
    rows, tokens, heads = 3, 4, 5
    x = randn(rows, tokens, heads, width + 8)[..., 8:]  # the end of each head, as in latent attention
    angles = torch.rand(rows, tokens, dim // 2, device="cuda") * 6
    out = attention.rope(x, angles.cos(), angles.sin(), interleaved)
    pairs = x[..., :dim].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    cos, sin = angles.double().cos()[:, :, None], angles.double().sin()[:, :, None]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2).flatten(-2)
    assert relative_error(out, torch.cat((turned, x[..., dim:].double()), -1)) < TOLERANCE[x.dtype]


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "count", "top_k"),
    [(1, 128, 6), (37, 128, 6), (256, 64, 8), (300, 16, 2), (1200, 16, 4), (40, 512, 22), (9, 896, 16)],
)
@pytest.mark.parametrize(
    ("activation", "limits"),
    [
        *(("relu2", (None, None)), ("swiglu", (None, None)), ("swiglu", (0.4, 0.5)), ("clamped_swiglu", (0.4, 0.5))),
        *(("situ", (0.8, 0.6)), ("situ", (0.8, None))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts(tokens, count, top_k, activation, limits, dtype):
    width, inner = 136, 200  # whole pieces of 16 bytes, but no whole tiles
    x = randn(tokens, width, dtype=dtype)
    rows = inner if activation == "relu2" else 2 * inner
    up, down = randn(count, rows, width, seed=1) / width**0.5, randn(count, width, inner, seed=2) / inner**0.5
    up, down = up.to(dtype), down.to(dtype)
    generator = torch.Generator().manual_seed(3)
    # Unequal shares: some experts have many tokens, others none.
    odds = torch.rand(tokens, count, generator=generator) * torch.arange(count).remainder(5).gt(0)
    odds[: tokens // 2, 1] = 2.0  # and one has a half of all
    indices = (odds + torch.arange(count) / count).topk(top_k, -1).indices.int().cuda()
    weights = torch.rand(tokens, top_k, generator=generator).cuda()
    out = experts.experts(x, indices, weights, up, down, activation, limits)
    want = torch.zeros(tokens, width, dtype=torch.float64, device="cuda")
    for j in range(top_k):
        chosen = indices[:, j].long()
        hidden = torch.einsum("td,tfd->tf", x.double(), up.double()[chosen])
        hidden = F.relu(hidden).square() if activation == "relu2" else gated(*hidden.chunk(2, -1), activation, limits)
        want += weights[:, j, None] * torch.einsum("tf,tdf->td", hidden, down.double()[chosen])
    assert relative_error(out, want) < 2 * TOLERANCE[dtype]
    assert torch.equal(out, experts.experts(x, indices, weights, up, down, activation, limits))
    # What is no number passes every activation and every limit.
    x[-1, 0] = NAN
    out = experts.experts(x, indices, weights, up, down, activation, limits)
    assert out[-1].isnan().all() and not out[:-1].isnan().any()


def gated(gate, factor, activation, limits):
    """The formulas of network/gated.py."""
    most, bound = (torch.inf if limit is None else limit for limit in limits)
    if activation == "situ":
        return (
            most
            * (gate / most).tanh()
            * gate.sigmoid()
            * (factor if limits[1] is None else bound * (factor / bound).tanh())
        )
    opened = F.silu(gate.clamp(max=most)) if activation == "clamped_swiglu" else F.silu(gate).clamp(max=most)
    return opened * factor.clamp(-bound, bound)


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("count", "top_k", "n_group", "topk_group"),
    [(128, 6, 1, 1), (256, 8, 8, 4), (512, 22, 1, 1), (896, 16, 1, 1), (8, 3, 4, 2)],
)
def test_route(router, count, top_k, n_group, topk_group):
    logits = randn(50, count, dtype=torch.float32)
    bias = randn(count, dtype=torch.float32, seed=1) * 0.1 if router == "sigmoid" else None
    indices, weights = experts.route(logits, bias, top_k, router, n_group, topk_group, True, 2.5)
    scores = logits.double().sigmoid() if router == "sigmoid" else logits.double().softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    if n_group > 1:
        best = choice.unflatten(1, (n_group, -1)).topk(2, -1).values.sum(-1).topk(topk_group, -1).indices
        kept = torch.zeros(50, n_group, dtype=torch.bool, device="cuda").scatter_(1, best, True)
        choice = choice.masked_fill(~kept.repeat_interleave(count // n_group, 1), float("-inf"))
    want = choice.topk(top_k, -1).indices
    assert torch.equal(indices.long(), want)
    share = scores.gather(1, want)
    assert relative_error(weights, share / share.sum(-1, keepdim=True) * 2.5) < 1e-5


@pytest.mark.parametrize("tokens", [1, 37, 1024])
def test_router_products_are_those_of_float32(tokens):
    x, weight = randn(tokens, 2688), randn(128, 2688, dtype=torch.float32, seed=1) / 50
    out = wide_linear(x, weight)
    assert out.dtype == torch.float32
    # Tensor cores round their float32 sums a little less carefully.
    assert relative_error(out, x.double() @ weight.double().T) < 5e-6


def test_route_gives_experts_whatever_the_logits_are():
    logits = torch.full((4, 128), NAN, device="cuda")
    logits[1], logits[2, 5] = float("-inf"), float("inf")
    indices, _ = experts.route(logits, None, 6, "sigmoid", 1, 1, True, 1.0)
    assert ((indices >= 0) & (indices < 128)).all()
    assert all(len(set(row)) == 6 for row in indices.tolist())
