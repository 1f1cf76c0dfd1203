"""Reference of ``replayssm::gated_delta`` and ``replayssm::kda``; the contracts are in the files of those names.

Both are one recurrence: a scalar decay per head is a decay per key channel that is the same for all channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trtllm_replayssm.plugins.gated_delta import L2_EPSILON, GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.reference.replay import (
    Recurrence,
    Tokens,
    add_outer,
    compute_dtype,
    matvec,
    replay_step,
)


def l2_normalise(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt()


class DeltaRule(Recurrence):
    """``S = S exp(g); u = beta (v - S k); S = S + u k^T; o = S q``, with k and q normalised here.

    Key heads are shared by consecutive value heads. With ``derived`` the ring's ``v`` row holds ``u``, so that replaying
    is a sum.
    """

    payload = ("k", "v", "g", "beta")

    def __init__(self, derived: bool) -> None:
        self.derived = derived

    def prepare(self, tokens: Tokens, from_ring: bool) -> Tokens:
        g = tokens["g"]
        prepared = {
            "k": l2_normalise(tokens["k"]),
            "v": tokens["v"],
            # One decay per key channel, or one for all of them.
            "decay": (g if g.ndim == 4 else g[..., None]).exp()[..., None, :],
        }
        if not (from_ring and self.derived):
            prepared["beta"] = tokens["beta"][..., None]
        if not from_ring:
            prepared["q"] = l2_normalise(tokens["q"]) * tokens["q"].shape[-1] ** -0.5
        return prepared

    def update(self, state: Tensor, token: Tokens) -> Tokens:
        state.mul_(token["decay"])
        u = token["v"]
        if "beta" in token:
            u = token["beta"] * (u - matvec(state, token["k"]))
        add_outer(state, u, token["k"])
        return {"v": u} if self.derived else {}

    def read(self, state: Tensor, token: Tokens) -> Tensor:
        return matvec(state, token["q"])


def delta_rule_tokens(
    qkv: Tensor, key_heads: int, value_heads: int, key_dim: int, g: Tensor, beta: Tensor, dtype: torch.dtype
) -> Tokens:
    """Tokens ``[rows, T, heads, ...]`` in ``dtype`` from the packed activations and the finished gates."""
    keys = key_heads * key_dim
    q, k, v = qkv.to(dtype).split([keys, keys, qkv.shape[-1] - 2 * keys], -1)
    return {
        "q": q.unflatten(-1, (key_heads, key_dim)),
        "k": k.unflatten(-1, (key_heads, key_dim)),
        "v": v.unflatten(-1, (value_heads, -1)),
        "g": g,
        "beta": beta,
    }


def gated_delta_tokens(
    a: GatedDeltaAttributes, qkv: Tensor, decay: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype
) -> tuple[DeltaRule, Tokens]:
    g = -A_log.to(dtype).exp() * softplus(decay.to(dtype) + dt_bias.to(dtype))
    beta = a.beta_scale * b.to(dtype).sigmoid()
    tokens = delta_rule_tokens(qkv, a.num_key_heads, a.num_value_heads, a.key_dim, g, beta, dtype)
    return DeltaRule(a.derived_fold), tokens


def gated_delta(
    attributes: GatedDeltaAttributes,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/gated_delta.py. Changes the pools in place and returns ``o [rows, T, Hv*V]`` in qkv's dtype."""
    recurrence, tokens = gated_delta_tokens(attributes, qkv, a, b, A_log, dt_bias, compute_dtype(pools["state"]))
    return replay_step(recurrence, tokens, step, pools).flatten(2).to(qkv.dtype)


def kda_tokens(
    a: KdaAttributes, qkv: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype
) -> tuple[DeltaRule, Tokens]:
    logits = (f.to(dtype) + dt_bias.to(dtype)).unflatten(-1, (a.num_heads, a.key_dim))
    rate = A_log.to(dtype).exp()[:, None]
    g = -rate * softplus(logits) if a.lower_bound is None else a.lower_bound * (rate * logits).sigmoid()
    tokens = delta_rule_tokens(qkv, a.num_heads, a.num_heads, a.key_dim, g, b.to(dtype).sigmoid(), dtype)
    return DeltaRule(a.derived_fold), tokens


def kda(
    attributes: KdaAttributes,
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/kda.py. Changes the pools in place and returns ``o [rows, T, H*V]`` in qkv's dtype."""
    recurrence, tokens = kda_tokens(attributes, qkv, f, b, A_log, dt_bias, compute_dtype(pools["state"]))
    return replay_step(recurrence, tokens, step, pools).flatten(2).to(qkv.dtype)
