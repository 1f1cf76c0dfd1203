"""The recurrences of Mamba-2, Gated DeltaNet and KDA for training: whole chunks at a time, in matrix products.

transformers' own torch forms hold every pair of a chunk times the width of a state (Mamba-2), or walk over the rows of a
chunk one by one (KDA); both are made for machines without kernels, and too slow to train with. These forms compute the same
functions of the same arguments, in float32, for whole texts only: no state goes in, none comes out.

With l tokens of a chunk, decays cumulated in logarithms c_i within it, and the state S before it:

    Mamba-2      y_i = C_i (exp(c_i) S + sum_{j <= i} exp(c_i - c_j) x_j dt_j B_j^T)
    delta rule   (I + A) U = beta V - beta exp(c) K S,  A_ij = beta_i k_i . exp(c_i - c_j) k_j for j < i
                 o_i = q_i exp(c_i) S + sum_{j <= i} (q_i . exp(c_i - c_j) k_j) u_j

Every decay is the exponential of a difference that is not positive, so nothing can overflow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Tokens of a chunk. KDA's pairs carry a decay for every key channel, so its chunks are short.
MAMBA2_CHUNK, GATED_DELTA_CHUNK, KDA_CHUNK = 64, 64, 16
#: Added to the squared length of a key or query, as in all implementations of the delta rule.
L2_EPSILON = 1e-6


def chunks(x: Tensor, size: int) -> Tensor:
    """``[b, T, heads, ...]`` as float32 ``[b, heads, chunks, size, ...]``, padded with zeros, which change no state."""
    padding = -x.shape[1] % size
    padded = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, padding))
    return padded.unflatten(1, (-1, size)).movedim(3, 1)


def whole(y: Tensor, length: int) -> Tensor:
    """``[b, heads, chunks, size, width]`` as ``[b, length, heads, width]``."""
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2)


def decays(later: Tensor, earlier: Tensor, diagonal: int) -> Tensor:
    """``exp(later_i - earlier_j)`` of logarithms ``[..., n, w]`` as ``[..., n, n, w]``, zero for j of i + diagonal and more."""
    n = later.shape[-2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=later.device).triu(diagonal)[..., None]
    return (later[..., :, None, :] - earlier[..., None, :, :]).masked_fill(hidden, float("-inf")).exp()


def refuse_states(*states: Any) -> None:
    """Raises ValueError when a caller wants to go on from a state, or to keep one."""
    if any(state is not None and state is not False for state in states):
        raise ValueError("the chunked forms are for training: they neither take nor return a state")


@torch.autocast("cuda", enabled=False)
def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **unused: Any,
) -> Tensor:
    """x ``[b, T, H, P]``, dt ``[b, T, H]``, B and C ``[b, T, G, N]``; returns float32 ``[b, T, H, P]``."""
    refuse_states(initial_states, return_final_states)
    x, per_group = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    cumulated = chunks((A * dt)[..., None], MAMBA2_CHUNK).cumsum(-2)
    inputs = chunks(x * dt[..., None], MAMBA2_CHUNK)
    keys, queries = (chunks(value, MAMBA2_CHUNK) for value in (B, C))
    scores = (queries @ keys.mT).repeat_interleave(per_group, 1)
    keys, queries = (value.repeat_interleave(per_group, 1) for value in (keys, queries))
    y = (scores * decays(cumulated, cumulated, 1)[..., 0]) @ inputs
    # What each chunk adds to the state, and from that the state before every chunk.
    ends = cumulated[..., -1, :]
    added = (inputs * (ends[..., None, :] - cumulated).exp()).mT @ keys
    total = ends.cumsum(-2)
    before = (decays(total - ends, total, 0)[..., 0] @ added.flatten(-2)).view_as(added)
    y = y + (queries * cumulated.exp()) @ before.mT
    return whole(y, x.shape[1]) + D[:, None] * x


def pair_products(k: Tensor, q: Tensor, cumulated: Tensor) -> tuple[Tensor, Tensor]:
    """``k_i . exp(c_i - c_j) k_j`` and the same with q_i, for j <= i: ``[..., l, l]`` each.

    cumulated: ``[..., l, 1]`` for one decay of all channels, ``[..., l, K]`` for one of each.
    """
    decay = decays(cumulated, cumulated, 1)
    if decay.shape[-1] == 1:
        return (k @ k.mT) * decay[..., 0], (q @ k.mT) * decay[..., 0]
    products = (decay * k[..., None, :, :]) @ torch.stack([k, q], -1)
    return products[..., 0], products[..., 1]


@torch.autocast("cuda", enabled=False)
def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, size: int) -> Tensor:
    """q and k ``[b, T, H, K]``, v ``[b, T, H, V]``, g ``[b, T, H, 1 or K]``, beta ``[b, T, H]``; returns like v."""
    q, k = (x.float() * (x.float().square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt() for x in (query, key))
    q, k, v, cumulated = (chunks(x, size) for x in (q * q.shape[-1] ** -0.5, k, value, g))
    strength, cumulated = chunks(beta, size)[..., None], cumulated.cumsum(-2)
    by_key, by_query = pair_products(k, q, cumulated)
    # Ones on the diagonal are implied, and what stands above it is not read.
    right = torch.cat([strength * v, strength * k * cumulated.exp()], -1)
    solved = torch.linalg.solve_triangular(strength * by_key, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    ends = cumulated[..., -1:, :]
    kept, written, asked = ends.exp().mT, (k * (ends - cumulated).exp()).mT, q * cumulated.exp()
    state, outputs = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), []
    parts = (part.unbind(2) for part in (values, reads, by_query, asked, kept, written))
    for value_rows, read_rows, attention, query_rows, keep, write in zip(*parts):
        updates = value_rows - read_rows @ state
        outputs.append(query_rows @ state + attention @ updates)
        state = keep * state + write @ updates
    return whole(torch.stack(outputs, 2), query.shape[1]).to(query.dtype)


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    refuse_states(initial_state, output_final_state)
    return delta_rule(query, key, value, g[..., None], beta, GATED_DELTA_CHUNK), None


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **unused: Any,
) -> tuple[Tensor, None]:
    refuse_states(initial_state, output_final_state)
    return delta_rule(query, key, value, g, beta, KDA_CHUNK), None


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **unused: Any
) -> Tensor:
    """``[b, channels, T]`` with taps ``[channels, kernel]``: a few sums instead of a convolution over single channels."""
    kernel, length = weight.shape[1], hidden_states.shape[2]
    padded = F.pad(hidden_states.float(), (kernel - 1, 0))
    y = torch.zeros_like(hidden_states, dtype=torch.float32)
    for i in range(kernel):
        y = y + padded[..., i : i + length] * weight[:, i, None]
    y = y if bias is None else y + bias[:, None]
    return (F.silu(y) if activation in ("silu", "swish") else y).to(hidden_states.dtype)


#: By the names that the modules of transformers call.
FORMS: dict[str, Callable[..., Any]] = {
    form.__name__: form
    for form in (mamba2_chunk_scan, torch_chunk_gated_delta_rule, chunk_kimi_delta_attention, causal_conv1d_fn)
}


@contextmanager
def chunked_forms(model: nn.Module) -> Iterator[None]:
    """In the block, the model's recurrences and convolutions are computed by the forms above."""
    module = sys.modules[type(model).__module__]
    own = {name: getattr(module, name) for name in FORMS if hasattr(module, name)}
    if len(own) < 2:
        raise ValueError(f"{module.__name__} has no recurrence that is known here; it has {list(own)}")
    for name in own:
        setattr(module, name, FORMS[name])
    try:
        yield
    finally:
        for name, form in own.items():
            setattr(module, name, form)
