"""Reference of ``replayssm::causal_conv``; the contract is in plugins/causal_conv.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import Step


def causal_conv(
    attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, step: Tensor, conv_ring: Tensor
) -> Tensor:
    """See plugins/causal_conv.py. Changes the ring in place and returns ``y [rows, T, channels]`` in x's dtype."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    slots, committed, query_len = (step[:, c].long() for c in (Step.SLOT, Step.COMMITTED, Step.QUERY_LEN))
    live, length, rows = slots >= 0, x.shape[1], attributes.conv_rows
    offsets = torch.arange(1 - attributes.kernel, 0, device=x.device)
    past = committed[:, None] + offsets
    window = conv_ring[slots.clamp(min=0)[:, None], past % rows].to(dtype)
    window = torch.where((live[:, None] & (past >= 0))[..., None], window, torch.zeros_like(window))
    padded = torch.cat([window, x.to(dtype)], 1)
    taps = padded.unfold(1, attributes.kernel, 1)
    y = (taps * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    if attributes.silu:
        y = silu(y)
    # Of a long chunk only the last conv_rows tokens fit the ring; earlier ones would be overwritten anyway.
    for i in range(length):
        kept = live & (i < query_len) & (i + rows >= query_len)
        conv_ring[slots[kept], (committed[kept] + i) % rows] = x[kept, i].to(conv_ring.dtype)
    valid = live[:, None] & (torch.arange(length, device=x.device) < query_len[:, None])
    return torch.where(valid[..., None], y, torch.zeros_like(y)).to(x.dtype)


