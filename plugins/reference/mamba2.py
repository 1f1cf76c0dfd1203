"""Reference of ``replayssm::mamba2``; the contract is in plugins/mamba2.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.replay import (
    Recurrence,
    Tokens,
    add_outer,
    compute_dtype,
    matvec,
    replay_step,
)
from trtllm_replayssm.plugins.reference.rounding import stochastic


class Mamba2Recurrence(Recurrence):
    """``S = exp(A dt) S + dt x B^T; y = S C + D x`` with ``A = -exp(A_log)``; B and C are shared by a group's heads."""

    payload = ("x", "b", "dt")

    def __init__(self, A_log: Tensor, D: Tensor) -> None:
        self.A = -A_log.exp()
        self.D = D

    def prepare(self, tokens: Tokens, from_ring: bool) -> Tokens:
        dt = tokens["dt"][..., None]
        prepared = {"decay": (self.A[:, None, None] * dt[..., None]).exp(), "dt_x": dt * tokens["x"], "b": tokens["b"]}
        return prepared if from_ring else prepared | {"c": tokens["c"]}

    def update(self, state: Tensor, token: Tokens) -> Tokens:
        add_outer(state.mul_(token["decay"]), token["dt_x"], token["b"])
        return {}

    def read(self, state: Tensor, token: Tokens) -> Tensor:
        return matvec(state, token["c"])

    def answer(self, reads: Tensor, tokens: Tokens) -> Tensor:
        return reads + self.D[:, None] * tokens["x"]


def round_states(states: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """States ``[rows, ...]`` rounded at random to a 16-bit ``dtype``; as they are for a wider one."""
    if dtype.itemsize != 2:
        return states
    seeds, positions = (step[:, column].tolist() for column in (Step.SEED, Step.FOLD_TO))
    rounded = (stochastic(s, dtype, seed, at) for s, seed, at in zip(states, seeds, positions))
    return torch.stack(list(rounded))


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
    rounded = partial(round_states, dtype=pools["state"].dtype) if a.stochastic_rounding else None
    return replay_step(recurrence, tokens, step, pools, rounded).flatten(2).to(xbc.dtype)


def mamba2_tokens(
    a: Mamba2Attributes, xbc: Tensor, dt: Tensor, A_log: Tensor, dt_bias: Tensor, D: Tensor, dtype: torch.dtype
) -> tuple[Mamba2Recurrence, Tokens]:
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
    return Mamba2Recurrence(A_log.to(dtype), D.to(dtype)), tokens
