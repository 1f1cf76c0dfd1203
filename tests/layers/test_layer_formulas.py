"""Every layer kind against a plain computation of the whole sequence: no cache, no ring, no packing tricks.

Written from the layer's formulas in float64; the recurrences come from the oracle of the plugin tests. What a packed weight
holds is stated here once more, by slicing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from layer_harness import LAYERS, PLAN, random_input, random_tokens, random_weights, run
from torch import Tensor

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.indexer import Indexer, MeanIndexer, PooledIndexer
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.layers.side_by_side import SideBySide
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.gated import Limit

Weights = dict[str, Tensor]


def heads_of(x: Tensor, heads: int) -> np.ndarray:
    return x.reshape(len(x), heads, -1).numpy()


def rms(x: Tensor, epsilon: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def mamba2(layer: Mamba2, w: Weights, x: Tensor) -> Tensor:
    inner, bc = layer.num_heads * layer.head_dim, layer.n_groups * layer.state_size
    projected = x @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    sizes = torch.tensor([inner, inner, bc, bc, layer.num_heads])
    projected = projected * torch.tensor(layer.scales or [1.0] * 5, dtype=x.dtype).repeat_interleave(sizes)
    z, xbc, dt = projected[:, :inner], projected[:, inner : 2 * inner + 2 * bc], projected[:, 2 * inner + 2 * bc :]
    xbc = oracle.conv(xbc, w["conv1d.weight"], w.get("conv1d.bias"))
    y, _ = oracle.mamba2(
        heads_of(xbc[:, :inner], layer.num_heads),
        heads_of(xbc[:, inner : inner + bc], layer.n_groups),
        heads_of(xbc[:, inner + bc :], layer.n_groups),
        dt.numpy(), *(w[name].numpy() for name in ("A_log", "dt_bias", "D")), (layer.dt_min, layer.dt_max),
    )  # fmt: skip
    gated = torch.from_numpy(y).flatten(1) * F.silu(z)
    if layer.norm_epsilon is not None:
        gated = torch.cat([rms(group, layer.norm_epsilon) for group in gated.chunk(layer.n_groups, -1)], -1)
        gated = gated * w["norm.weight"]
    return gated @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def gated_delta(layer: GatedDelta, w: Weights, x: Tensor) -> Tensor:
    keys, values, heads = (
        layer.num_key_heads * layer.key_dim,
        layer.num_value_heads * layer.value_dim,
        layer.num_value_heads,
    )
    q, k, v, z, b, a = (x @ part.T for part in w["in_proj.weight"].split([keys, keys, values, values, heads, heads]))
    taps = w["conv1d.weight"].split([keys, keys, values])
    q, k, v = (oracle.conv(part, weight, None) for part, weight in zip((q, k, v), taps))
    gates = (a.numpy(), b.numpy(), w["A_log"].numpy(), w["dt_bias"].numpy())
    g, beta = oracle.gated_delta_gates(*gates, layer.key_dim, layer.beta_scale)
    o, _ = oracle.delta_rule(
        heads_of(q, layer.num_key_heads), heads_of(k, layer.num_key_heads), heads_of(v, heads), g, beta
    )
    normed = rms(torch.from_numpy(o), layer.norm_epsilon) * w["norm.weight"]
    gate = F.silu(z) if layer.gate == "silu" else z.sigmoid()
    return (normed.flatten(1) * gate) @ w["out_proj.weight"].T


def kda(layer: Kda, w: Weights, x: Tensor) -> Tensor:
    q, k, v = (
        heads_of(oracle.conv(x @ weight.T, taps, None), layer.num_heads)
        for weight, taps in zip(w["qkv.weight"].chunk(3), w["conv1d.weight"].chunk(3))
    )
    f, z = (
        x @ w[f"{gate}.weight"].T if f"{gate}.weight" in w else x @ w[f"{gate}_a.weight"].T @ w[f"{gate}_b.weight"].T
        for gate in ("f", "g")
    )
    bias = w["dt_bias"].reshape(layer.num_heads, -1).numpy()
    beta = (x @ w["b.weight"].T).numpy()
    g, beta = oracle.kda_gates(heads_of(f, layer.num_heads), beta, w["A_log"].numpy(), bias, layer.lower_bound)
    o, _ = oracle.delta_rule(q, k, v, g, beta)
    normed = rms(torch.from_numpy(o), layer.norm_epsilon) * w["norm.weight"]
    return (normed.flatten(1) * z.sigmoid()) @ w["out_proj.weight"].T


def rotated(x: Tensor, rope: Rope | None) -> Tensor:
    """x ``[T, heads, D]`` turned as complex numbers, token t by t times each frequency."""
    if rope is None:
        return x
    turned, rest = x[..., : rope.dim], x[..., rope.dim :]
    pairs = turned.unflatten(-1, (-1, 2)) if rope.interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    frequencies = rope.theta ** (-torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(spun)
    return torch.cat(((pairs if rope.interleaved else pairs.transpose(-1, -2)).flatten(-2), rest), -1)


def causal(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, chosen: Tensor | None = None
) -> Tensor:
    """q ``[T, H, D]``, k and v ``[T, Hkv, D]``; ``[T, H * Dv]``. chosen: bool ``[T, T]``, the keys that a token may see."""
    behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (behind >= 0) & (behind < (window or len(q)))
    seen = seen if chosen is None else seen & chosen
    share = q.shape[1] // k.shape[1]
    heads = (x.transpose(0, 1) for x in (q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)))
    return F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale).transpose(0, 1).flatten(1)


def chosen_keys(indexer: Indexer | None, w: Weights, x: Tensor, query: Tensor) -> Tensor | None:
    """bool ``[T, T]``: for every token, the whole blocks of best scores, and what lies behind the last whole block."""
    if indexer is None:
        return None
    w = {name.removeprefix("indexer."): value for name, value in w.items() if name.startswith("indexer.")}
    scores = INDEX_SCORES[type(indexer)](indexer, w, x, query)
    chosen = torch.zeros(len(x), len(x), dtype=torch.bool)
    partial = 0
    for t in range(len(x)):
        whole = (t + 1) // indexer.block
        best = sorted(range(whole), key=lambda block: -scores[t, block].item())[: indexer.count]
        partial += len(best) < whole
        for block in best:
            chosen[t, block * indexer.block : (block + 1) * indexer.block] = True
        chosen[t, whole * indexer.block :] = True
    assert partial > len(x) // 3, "most tokens must have something to leave out"
    return chosen


def pooled_scores(indexer: PooledIndexer, w: Weights, x: Tensor, query: Tensor) -> Tensor:
    q = (query @ w["q.weight"].T).unflatten(-1, (indexer.num_heads, -1))
    keys = F.layer_norm(
        x @ w["k.weight"].T, (indexer.head_dim,), w["norm.weight"], w["norm.bias"], indexer.norm_epsilon
    )
    gates, position = x @ w["gate.weight"].T, w["position.weight"].unflatten(0, (indexer.head_dim, indexer.block)).T
    whole = len(x) // indexer.block
    by_block = [part[: whole * indexer.block].unflatten(0, (whole, indexer.block)) for part in (keys, gates)]
    pooled = ((by_block[1] + position).softmax(1) * by_block[0]).sum(1)
    products = torch.einsum("thd,pd->thp", q, pooled).relu()
    weights = (x @ w["head.weight"].T) / math.sqrt(indexer.num_heads * indexer.head_dim)
    return torch.einsum("thp,th->tp", products, weights)


def mean_scores(indexer: MeanIndexer, w: Weights, x: Tensor, query: Tensor) -> Tensor:
    width, block = indexer.head_dim, indexer.block
    q, k = (query @ w["qk.weight"].T).split([indexer.num_heads * width, width], -1)
    q = rms(q.unflatten(-1, (-1, width)), indexer.norm_epsilon) * (1 + w["q_norm.weight"])
    whole = len(x) // block
    mean = k[: whole * block].unflatten(0, (whole, block)).mean(1)
    normed = rms(mean, indexer.norm_epsilon) * (1 + w["k_norm.weight"])
    # Rotated as if the mean stood at every position; each block takes the one of its first.
    turned = rotated(normed.repeat_interleave(block, 0)[:, None], indexer.rope)[::block, 0]
    return torch.einsum("thd,pd->thp", rotated(q, indexer.rope), turned).relu().sum(1)


INDEX_SCORES: dict[type[Indexer], Callable] = {PooledIndexer: pooled_scores, MeanIndexer: mean_scores}


def attention(layer: Attention, w: Weights, x: Tensor) -> Tensor:
    q_width, kv_width = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    projected = x @ w["qkv.weight"].T + w.get("qkv.bias", 0)
    gate = projected[:, q_width : 2 * q_width] if layer.output_gate else None
    k, v = projected[:, -2 * kv_width : -kv_width], projected[:, -kv_width:]
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in (projected[:, :q_width], k, v))
    if layer.qk_norm_epsilon is not None:
        centre = 1 if layer.qk_norm_zero_centred else 0
        for_norm = (lambda y: y.flatten(1)) if layer.qk_norm_joint else (lambda y: y)
        q, k = (
            (rms(for_norm(y), layer.qk_norm_epsilon) * (centre + w[f"{n}_norm.weight"])).reshape(y.shape)
            for y, n in ((q, "q"), (k, "k"))
        )
    chosen = chosen_keys(layer.indexer, w, x, x)
    out = causal(rotated(q, layer.rope), rotated(k, layer.rope), v, layer.scale, layer.window, chosen)
    return (out if gate is None else out * gate.sigmoid()) @ w["dense.weight"].T + w.get("dense.bias", 0)


def mla(layer: Mla, w: Weights, x: Tensor) -> Tensor:
    """Keys and values are expanded per head, which the layer never does."""
    chosen = None
    if layer.q_rank is None:
        q = x @ w["q.weight"].T
    else:
        low = rms(x @ w["q_a.weight"].T, layer.q_epsilon or layer.latent_epsilon) * w["q_a_norm.weight"]
        q = low @ w["q_b.weight"].T
        chosen = chosen_keys(layer.indexer, w, x, low)
    q = q.unflatten(-1, (layer.num_heads, -1))
    compressed = x @ w["kv_a.weight"].T
    latent = rms(compressed[:, : layer.kv_rank], layer.latent_epsilon) * w["kv_a_norm.weight"]
    k_rope = rotated(compressed[:, None, layer.kv_rank :], layer.rope).expand(-1, layer.num_heads, -1)
    k = torch.cat((torch.einsum("tr,hrn->thn", latent, w["k_up.weight"]), k_rope), -1)
    q = torch.cat((q[..., : layer.nope_dim], rotated(q[..., layer.nope_dim :], layer.rope)), -1)
    out = causal(q, k, torch.einsum("tr,hvr->thv", latent, w["v_up.weight"]), q.shape[-1] ** -0.5, chosen=chosen)
    if layer.gate is not None:
        gate = (x @ w["gate.weight"].T).sigmoid()
        out = out * (gate.repeat_interleave(layer.value_dim, -1) if layer.gate == "head" else gate)
    return out @ w["dense.weight"].T


def mlp(layer: Mlp, w: Weights, x: Tensor) -> Tensor:
    hidden = x @ w["up.weight"].T + w.get("up.bias", 0)
    if layer.gate_scale != 1:
        gate, up = hidden.chunk(2, -1)
        hidden = torch.cat((layer.gate_scale * gate, up), -1)
    hidden = feed_forward(hidden, layer.activation, layer.limit)
    return hidden @ w["down.weight"].T + w.get("down.bias", 0)


def feed_forward(hidden: Tensor, activation: str, limit: Limit) -> Tensor:
    if activation == "relu2":
        return hidden.relu() ** 2
    gate, up = hidden.chunk(2, -1)
    most, bound = (torch.inf if own is None else own for own in (limit if isinstance(limit, tuple) else (limit, limit)))
    if activation == "situ":
        return (
            most * (gate / most).tanh() * gate.sigmoid() * (up if bound == torch.inf else bound * (up / bound).tanh())
        )
    if activation == "clamped_swiglu":
        return F.silu(gate.clamp(max=most)) * up.clamp(-bound, bound)
    return F.silu(gate).clamp(max=most) * up.clamp(-bound, bound)


def moe(layer: Moe, w: Weights, x: Tensor) -> Tensor:
    logits = x @ w["router.weight"].T
    scores = logits.softmax(-1) if layer.router == "softmax" else logits.sigmoid()
    choice = scores + w.get("router.bias", 0)
    routed = x if layer.latent_size is None else x @ w["latent_in.weight"].T
    rows = []
    for t in range(len(x)):
        eligible = set(range(layer.num_experts))
        if layer.n_group > 1:
            size = layer.num_experts // layer.n_group
            groups = [range(i * size, (i + 1) * size) for i in range(layer.n_group)]
            groups.sort(key=lambda group: -sum(sorted(choice[t, list(group)].tolist())[-2:]))
            eligible = {e for group in groups[: layer.topk_group] for e in group}
        chosen = sorted(eligible, key=lambda e: -choice[t, e].item())[: layer.top_k]
        total = scores[t, chosen].sum() if layer.normalise else 1.0
        row = torch.zeros(routed.shape[1], dtype=x.dtype)
        for e in chosen:
            hidden = feed_forward(w["experts.up.weight"][e] @ routed[t], layer.activation, layer.limit)
            row += layer.routed_scale * scores[t, e] / total * (w["experts.down.weight"][e] @ hidden)
        rows.append(row)
    out = torch.stack(rows)
    if layer.latent_epsilon is not None:
        out = rms(out, layer.latent_epsilon) * w["latent_norm.weight"]
    if layer.latent_size is not None:
        out = out @ w["latent_out.weight"].T
    if layer.shared is not None:
        shared = mlp(layer.shared, {n.removeprefix("shared."): v for n, v in w.items() if n.startswith("shared.")}, x)
        out = out + (shared * (x @ w["shared_gate.weight"].T).sigmoid() if layer.shared_gate else shared)
    return out


def side_by_side(layer: SideBySide, w: Weights, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for part in layer.layers:
        weights = {n.removeprefix(f"{part.kind}."): v for n, v in w.items() if n.startswith(f"{part.kind}.")}
        total += part.output_scale * FORMULAS[part.kind](part, weights, part.input_scale * x)
    return total


def ngram(layer: NgramEmbedding, w: Weights, x: Tensor, tokens: list[int]) -> Tensor:
    table = w["table.weight"].flatten(0, 1)
    embedded = torch.stack(
        [torch.cat([table[row] for row in table_rows(layer, tokens[: t + 1])]) for t in range(len(x))]
    )

    def by_stream(y: Tensor, norm: str) -> Tensor:
        y = y.unflatten(-1, (layer.streams, -1))
        return rms(y, layer.norm_epsilon) * (1 + w[f"{norm}.weight"].unflatten(0, (layer.streams, -1)))

    key, query = by_stream(embedded @ w["key.weight"].T, "key_norm"), by_stream(x, "query_norm")
    score = (key * query).sum(-1) / math.sqrt(x.shape[-1] // layer.streams)
    gate = torch.sign(score) * score.abs().clamp(min=1e-6).sqrt()
    let_in = gate.sigmoid()[..., None] * (embedded @ w["value.weight"].T)[:, None]
    normed = by_stream(let_in.flatten(1), "conv_norm").flatten(1)
    return let_in.flatten(1) + oracle.conv(normed, w["conv1d.weight"], None)


def table_rows(layer: NgramEmbedding, tokens: list[int]) -> list[int]:
    """Rows for the n-grams that end at the last token, of which nothing before the last end of a text counts."""
    rows, text = [], list(reversed(tokens))
    before = text[1:]
    if layer.end_token in before:
        before = before[: before.index(layer.end_token)]
    history = [text[0], *before, *[layer.end_token] * layer.ngram_size]
    for order in range(2, layer.ngram_size + 1):
        mixed = 0
        for token, multiplier in zip(history[:order], layer.hash.multipliers):
            mixed ^= token * multiplier
        for head in range((order - 2) * layer.heads, (order - 1) * layer.heads):
            rows.append(sum(layer.hash.primes[:head]) + mixed % layer.hash.primes[head])
    return rows


FORMULAS: dict[str, Callable] = {
    "mamba2": mamba2, "gated_delta": gated_delta, "kda": kda, "attention": attention, "mla": mla, "mlp": mlp, "moe": moe,
    "side_by_side": side_by_side,
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_steps_is_its_formula_over_the_sequence(name: str) -> None:
    """Prefill in chunks, verify with rejected drafts, decode and forced flush, against one pass over the kept tokens."""
    layer, weights = LAYERS[name], random_weights(LAYERS[name])
    (output,) = run(layer, weights)
    wide = {weight: value.double() for weight, value in weights.items()}
    accepted = sum(step[1] for step in PLAN)
    for row, x in enumerate(random_input().double()):
        if isinstance(layer, NgramEmbedding):
            expected = ngram(layer, wide, x[:accepted], random_tokens()[row].tolist())
        else:
            expected = FORMULAS[layer.kind](layer, wide, x[:accepted])
        assert expected.std() > 100 * 2e-5, "the comparison must have something to see"
        torch.testing.assert_close(output[row].double(), expected, atol=2e-5, rtol=2e-5)
