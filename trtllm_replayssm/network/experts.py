"""Mixture of experts in torch: one expert after the other, over its tokens or over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.network.gated import GATED, Limit
from trtllm_replayssm.network.packed import StoredWeight, dense

if TYPE_CHECKING:
    from trtllm_replayssm.network.base import Network


def expert(net: Network, x: Tensor, up: StoredWeight, down: StoredWeight, activation: str, limit: Limit) -> Tensor:
    """One expert's output, float32: x ``[tokens, D]``; see Network.experts for the rest."""
    up, down = dense(up), dense(down)
    hidden = F.linear(x.to(up.dtype), up)
    if activation in GATED:
        gate, factor = hidden.chunk(2, -1)
        hidden = GATED[activation](net, gate, factor, limit)
    else:
        hidden = F.relu(hidden).square()
    return F.linear(hidden, down).float()


def looped_experts(
    net: Network,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: StoredWeight,
    down: StoredWeight,
    activation: str,
    limit: Limit,
) -> Tensor:
    """See Network.experts; x ``[tokens, D]``. Each expert computes its own tokens, which the host must know."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in indices.unique().tolist():
        token, place = (indices == e).nonzero(as_tuple=True)
        part = expert(net, x[token], up[e], down[e], activation, limit)
        out.index_add_(0, token, part * weights[token, place, None].float())
    return out.to(x.dtype)


def masked_experts(
    net: Network,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: StoredWeight,
    down: StoredWeight,
    activation: str,
    limit: Limit,
) -> Tensor:
    """The same without a word from the device: each expert computes all tokens, and those that chose it take the result."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in range(up.shape[0]):
        chose = indices == e
        share = torch.where(chose, weights.float(), 0.0).sum(-1, keepdim=True)
        part = expert(net, x, up[e], down[e], activation, limit)
        out += torch.where(chose.any(-1, keepdim=True), part * share, 0.0)
    return out.to(x.dtype)
