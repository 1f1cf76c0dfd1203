"""Reference of ``replayssm::causal_conv``; the contract is in plugins/causal_conv.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.reference.replay import keep


def causal_conv(
    attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, step: Tensor, conv_ring: Tensor
) -> Tensor:
    """See plugins/causal_conv.py. Changes the ring in place and returns ``y [rows, T, channels]`` in x's dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    slots, committed, query_len = (step[:, c].long() for c in (Step.SLOT, Step.COMMITTED, Step.QUERY_LEN))
    live, length, rows = slots >= 0, x.shape[1], attributes.conv_rows
    past = committed[:, None] + torch.arange(1 - attributes.kernel, 0, device=x.device)
    window = keep(live[:, None] & (past >= 0), conv_ring[slots.clamp(min=0)[:, None], past % rows].to(dtype))
    padded, taps = torch.cat([window, x.to(dtype)], 1), weight.to(dtype)
    y = padded[:, :length] * taps[:, 0]
    for i in range(1, attributes.kernel):
        y.addcmul_(padded[:, i : i + length], taps[:, i])
    if bias is not None:
        y += bias.to(dtype)
    if attributes.silu:
        y = silu(y)
    tokens = torch.arange(length, device=x.device)
    valid = live[:, None] & (tokens < query_len[:, None])
    # Of a long chunk only the last conv_rows tokens fit the ring; earlier ones would be overwritten anyway.
    row, token = (valid & (tokens + rows >= query_len[:, None])).nonzero(as_tuple=True)
    conv_ring[slots[row], (committed[row] + token) % rows] = x[row, token].to(conv_ring.dtype)
    return keep(valid, y).to(x.dtype)
