"""``TorchNetwork`` op by op against plain torch and the functions of transformers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, apply_rotary_pos_emb

from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def network(
    rows: list[tuple[int, int, int]], kv_len: int = 16, activation: torch.dtype = torch.float32
) -> TorchNetwork:
    """rows: (slot, committed, query_len)."""
    step = torch.zeros(len(rows), STEP_WORDS, dtype=torch.int32)
    for column, values in zip((Step.SLOT, Step.COMMITTED, Step.QUERY_LEN), zip(*rows)):
        step[:, column] = torch.tensor(values, dtype=torch.int32)
    return TorchNetwork({}, {}, step, activation, kv_len)


ANY = network([(0, 0, 1)])


# ---- dense ops -------------------------------------------------------------------------------------------------------


def test_embedding_comes_in_the_activation_dtype() -> None:
    table, ids = torch.randn(7, 4), torch.tensor([[6, 0, 3]], dtype=torch.int32)
    assert torch.equal(ANY.embedding(ids, table), table[[6, 0, 3]][None])
    narrow = network([(0, 0, 1)], activation=torch.bfloat16).embedding(ids, table)
    assert torch.equal(narrow, table[[6, 0, 3]][None].bfloat16())


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    offset = torch.randn(4) if bias else None
    expected = torch.einsum("bti,oi->bto", x, weight) + (0 if offset is None else offset)
    torch.testing.assert_close(ANY.linear(x, weight, offset), expected)


def test_linear_works_in_the_dtype_of_its_weight() -> None:
    """A float32 router keeps float32 logits of 16-bit activations."""
    x, weight = torch.randn(1, 2, 64).bfloat16(), torch.randn(8, 64)
    torch.testing.assert_close(ANY.linear(x, weight), x.float() @ weight.T, atol=1e-5, rtol=1e-5)
    assert ANY.linear(x.float(), weight.bfloat16()).dtype == torch.bfloat16


def test_rms_norm_is_transformers_zero_centred_norm() -> None:
    module = Qwen3NextRMSNorm(12, eps=1e-6)
    module.weight.data.normal_()
    x = torch.randn(2, 3, 12)
    torch.testing.assert_close(ANY.rms_norm(x, module.weight.data, 1e-6, zero_centred=True), module(x))


@pytest.mark.parametrize("groups", [1, 3])
def test_rms_norm_by_groups(groups: int) -> None:
    x, weight = torch.randn(2, 3, 12), torch.randn(12)
    parts = [F.rms_norm(part, (12 // groups,), eps=1e-5) for part in x.chunk(groups, -1)]
    torch.testing.assert_close(ANY.rms_norm(x, weight, 1e-5, groups=groups), torch.cat(parts, -1) * weight)


def test_rms_norm_of_large_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 1, 8), 6e4, dtype=torch.float16)
    assert torch.equal(ANY.rms_norm(x, torch.ones(8), 1e-5), torch.ones(1, 1, 8, dtype=torch.float16))


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("silu", lambda x: x / (1 + (-x).exp())),
        ("sigmoid", lambda x: 1 / (1 + (-x).exp())),
        ("tanh", lambda x: 1 - 2 / (1 + (2 * x).exp())),
        ("relu2", lambda x: x.clamp(min=0) ** 2),
    ],
)
def test_activations(kind, function) -> None:
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(ANY.activation(x, kind), function(x))


def test_elementwise_ops_and_shapes() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 1)
    assert torch.equal(ANY.add(a, b), a + b)
    assert torch.equal(ANY.multiply(a, b), a * b)
    assert torch.equal(ANY.divide(a, b), a / b)
    assert torch.equal(ANY.scale(a, -2.0), -2 * a)
    assert torch.equal(ANY.clamp(a, -math.inf, 0.5), a.minimum(torch.tensor(0.5)))
    assert torch.equal(ANY.sum(a), a.sum(-1, keepdim=True))
    assert torch.equal(ANY.concat(ANY.split(a, (1, 3))), a)
    assert torch.equal(ANY.slice_last(a, 3), a[..., :3])
    assert torch.equal(ANY.flatten(ANY.unflatten(a, (2, -1))), a)
    assert ANY.flatten(torch.zeros(2, 3, 4, 5), 3).shape == (2, 60)
    assert ANY.add_bias(a.bfloat16(), torch.ones(4)).dtype == torch.bfloat16
    assert ANY.cast(a.bfloat16(), "float32").dtype == torch.float32
    assert ANY.cast_like(a, b.half()).dtype == torch.float16
    assert ANY.all_reduce(a) is a
    assert ANY.all_gather(a) is a


def test_per_head() -> None:
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(4, 6, 5)
    expected = torch.stack([x[:, :, h] @ weight[h].T for h in range(4)], 2)
    torch.testing.assert_close(ANY.per_head(x, weight), expected)


def test_select_last_takes_the_last_valid_token() -> None:
    x = torch.randn(4, 5, 3)
    selected = network([(0, 0, 5), (1, 9, 1), (-1, 0, 0), (2, 0, 3)]).select_last(x)
    assert torch.equal(selected[[0, 1, 3], 0], x[[0, 1, 3], [4, 0, 2]])


def test_tables_in_parts_are_one_table() -> None:
    table, ids = torch.randn(3, 4, 5), torch.tensor([[[11, 0], [3, 7]]], dtype=torch.int32)
    assert torch.equal(ANY.embedding(ids, table), table.flatten(0, 1)[ids.long()])


def test_norm_without_a_weight() -> None:
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ANY.rms_norm(x, None, 1e-3), ANY.rms_norm(x, torch.ones(6), 1e-3))


def test_root_that_keeps_the_sign() -> None:
    x = torch.tensor([-4.0, -1e-9, 0.0, 1e-9, 9.0])
    torch.testing.assert_close(ANY.activation(x, "signed_root"), torch.tensor([-2.0, -1e-3, 0.0, 1e-3, 3.0]))


def test_products_sums_and_offsets_of_matrices() -> None:
    a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(ANY.matmul(a, b, transpose_a=True), torch.einsum("btki,btkj->btij", a, b))
    torch.testing.assert_close(ANY.matmul(a, a.transpose(-1, -2)), torch.einsum("btik,btjk->btij", a, a))
    torch.testing.assert_close(ANY.sum(a, -2), a.sum(-2, keepdim=True))
    assert torch.equal(ANY.offset(a, 0.5), a + 0.5)


def test_rope_at_shifted_positions() -> None:
    """As if the tokens stood three positions further back; positions below 0 are nobody's."""
    x = torch.randn(1, 2, 1, 8)
    got = network([(0, 9, 2)]).rope(x, Rope(8, 1e4, shift=-3))
    torch.testing.assert_close(got, network([(0, 6, 2)]).rope(x, Rope(8, 1e4)))


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "head_dim"), [(8, 8), (4, 12)])
def test_rope_is_that_of_transformers(interleaved: bool, dim: int, head_dim: int) -> None:
    """Half-split and interleaved pairs, partial rotation, rows at different positions."""
    x, starts = torch.randn(2, 5, 3, head_dim), [0, 1000]
    positions = torch.tensor(starts)[:, None] + torch.arange(5)
    angles = positions[..., None].float() / 1e4 ** (torch.arange(0, dim, 2).float() / dim)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    net = network([(0, starts[0], 5), (1, starts[1], 5)])
    turned = net.rope(x, Rope(dim, 1e4, interleaved))
    assert torch.equal(turned[..., dim:], x[..., dim:])
    heads_first, key = x[..., :dim].transpose(1, 2), torch.randn(2, 5, 1, dim)
    apply = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    q, k = (part.transpose(1, 2) for part in apply(heads_first, key.transpose(1, 2), cos, sin))
    ours, ours_key = turned[..., :dim], net.rope(key, Rope(dim, 1e4, interleaved))
    if interleaved:
        # transformers leaves the pairs de-interleaved; scores do not see the order, channels are put back to compare.
        q, k = (part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for part in (q, k))
    torch.testing.assert_close(ours, q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours_key, k, atol=1e-5, rtol=1e-5)


def test_cache_update_writes_valid_tokens_at_their_positions() -> None:
    cache = torch.full((3, 2, 9, 4), math.nan)
    x = torch.randn(3, 3, 2, 4)
    assert network([(0, 5, 3), (-1, 0, 0), (2, 0, 1)]).cache_update(cache, x) is cache
    assert torch.equal(cache[0, :, 5:8], x[0].transpose(0, 1))
    assert torch.equal(cache[2, :, 0], x[2, 0])
    assert cache.isfinite().sum() == (3 + 1) * 8


@pytest.mark.parametrize("window", [None, 1, 4, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_sees_the_prefix_and_nothing_behind_it(heads: int, kv_heads: int, window: int | None) -> None:
    """Grouped heads, rows at different prefixes, ragged queries, NaN in cache rows nobody wrote, a padding row.

    In a window a token sees itself and those before it, so many in all.
    """
    rows = [(0, 6, 3), (-1, 0, 0), (2, 0, 2), (3, 11, 1)]
    q = torch.randn(4, 3, heads, 8)
    k, v = torch.full((4, kv_heads, 20, 8), math.nan), torch.full((4, kv_heads, 20, 5), math.nan)
    for row, (slot, committed, length) in enumerate(rows):
        if slot >= 0:
            k[row, :, : committed + length].normal_()
            v[row, :, : committed + length].normal_()
    out = network(rows, kv_len=12).attention(q, k, v, 0.3, window)
    assert out.shape == (4, 3, heads, 5)
    assert not out[1].any()
    for row, (slot, committed, length) in enumerate(rows):
        for i in range(length if slot >= 0 else 0):
            seen = slice(max(0, committed + i + 1 - (window or 50)), committed + i + 1)
            keys = k[row, :, seen].repeat_interleave(heads // kv_heads, 0)
            values = v[row, :, seen].repeat_interleave(heads // kv_heads, 0)
            weights = (torch.einsum("hd,hsd->hs", q[row, i], keys) * 0.3).softmax(-1)
            torch.testing.assert_close(out[row, i], torch.einsum("hs,hsd->hd", weights, values))


def test_rejected_drafts_are_gone_from_the_cache() -> None:
    """The next step writes over them; a longer old request behind the live rows is never seen."""
    k, v = torch.full((1, 1, 12, 4), math.nan), torch.full((1, 1, 12, 4), math.nan)
    x = torch.randn(1, 7, 1, 4)
    answers, done = [], 0
    for kept, drafts in ((3, 0), (1, 3), (2, 2), (1, 1)):
        tokens = torch.cat((x[:, done : done + kept], torch.full((1, drafts, 1, 4), 50.0)), 1)
        net = network([(0, done, kept + drafts)], kv_len=done + kept + drafts)
        keys, values = net.cache_update(k, tokens), net.cache_update(v, tokens)
        answers.append(net.attention(tokens, keys, values, 0.5)[:, :kept])
        done += kept
    whole = F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3, is_causal=True, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(torch.cat(answers, 1), whole)


# ---- mixture of experts ----------------------------------------------------------------------------------------------


def test_router_ops() -> None:
    x = torch.randn(2, 3, 6).bfloat16()
    torch.testing.assert_close(ANY.softmax(x), x.double().softmax(-1).float())
    values, indices = ANY.top_k(x.float(), 2)
    assert indices.dtype == torch.int32
    order = x.float().sort(-1, descending=True)
    assert torch.equal(values, order.values[..., :2])
    assert torch.equal(ANY.gather(x.float(), indices), values)


def test_mask_groups_keeps_the_chosen_groups_only() -> None:
    scores, groups = torch.randn(2, 1, 6), torch.tensor([[[2]], [[0]]], dtype=torch.int32)
    masked = ANY.mask_groups(scores, groups, 3)
    assert torch.equal(masked[0, 0, 4:], scores[0, 0, 4:])
    assert torch.equal(masked[1, 0, :2], scores[1, 0, :2])
    assert (masked == -math.inf).sum() == 8


@pytest.mark.parametrize(("activation", "limit"), [("swiglu", None), ("swiglu", 0.1), ("relu2", None)])
def test_experts_equal_a_dense_loop(activation: str, limit: float | None) -> None:
    experts, width, inner = 5, 4, 3
    x, down = torch.randn(2, 3, width), torch.randn(experts, width, inner)
    up = torch.randn(experts, inner * (2 if activation == "swiglu" else 1), width)
    indices = torch.stack([torch.randperm(experts)[:2] for _ in range(6)]).view(2, 3, 2).int()
    weights, expected = torch.rand(2, 3, 2), torch.zeros(2, 3, width)
    for b in range(2):
        for t in range(3):
            for j, e in enumerate(indices[b, t].tolist()):
                hidden = up[e] @ x[b, t]
                if activation == "relu2":
                    hidden = hidden.clamp(min=0) ** 2
                else:
                    gate, value = F.silu(hidden[:inner]), hidden[inner:]
                    if limit is not None:
                        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
                    hidden = gate * value
                expected[b, t] += weights[b, t, j] * (down[e] @ hidden)
    torch.testing.assert_close(ANY.experts(x, indices, weights, up, down, activation, limit), expected)
