"""Reference of ``replayssm::mamba2``; the contract is in plugins/mamba2.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.replay import Recurrence, Token, compute_dtype, replay_step


class Mamba2Recurrence(Recurrence):
    payload = ("x", "b", "dt")

    def __init__(self, attributes: Mamba2Attributes, A_log: Tensor, D: Tensor) -> None:
        self.heads_per_group = attributes.num_heads // attributes.n_groups
        self.A = -A_log.exp()
        self.D = D

    def update(self, state: Tensor, token: Token) -> Tensor:
        dt = token["dt"][..., None, None]
        b = token["b"].repeat_interleave(self.heads_per_group, 1)
        return (self.A[:, None, None] * dt).exp() * state + dt * token["x"][..., None] * b[..., None, :]

    def read(self, state: Tensor, token: Token) -> Tensor:
        c = token["c"].repeat_interleave(self.heads_per_group, 1)
        return (state @ c[..., None])[..., 0] + self.D[:, None] * token["x"]


def mamba2(
    attributes: Mamba2Attributes,
    xbc: Tensor,
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/mamba2.py. Changes the pools in place and returns ``y [rows, T, H*P]`` in xbc's dtype."""
    a = attributes
    recurrence, tokens = mamba2_tokens(a, xbc, dt, A_log, dt_bias, D, compute_dtype(pools["state"]))
    return replay_step(recurrence, tokens, step, pools).flatten(2).to(xbc.dtype)


def mamba2_tokens(
    a: Mamba2Attributes, xbc: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor, dtype: torch.dtype
) -> tuple[Mamba2Recurrence, Token]:
    """The recurrence and its tokens ``[rows, T, heads, ...]`` in ``dtype``."""
    inner, groups = a.num_heads * a.head_dim, a.n_groups * a.state_size
    x, b, c = xbc.to(dtype).split([inner, groups, groups], -1)
    processed = softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(a.dt_min, a.dt_max)
    tokens = {
        "x": x.unflatten(-1, (a.num_heads, a.head_dim)),
        "b": b.unflatten(-1, (a.n_groups, a.state_size)),
        "c": c.unflatten(-1, (a.n_groups, a.state_size)),
        "dt": processed,
    }
    return Mamba2Recurrence(a, A_log.to(dtype), D.to(dtype)), tokens
