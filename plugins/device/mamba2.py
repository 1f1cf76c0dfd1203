"""CUDA implementation of ``replayssm::mamba2``; the contract is in plugins/mamba2.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride, token_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: Largest finite float32: "no upper clamp" in the kernels.
NO_CLAMP = "3.4028235e38f"


def defines(a: Mamba2Attributes, activation: torch.dtype, state: torch.dtype, ring: torch.dtype) -> tuple:
    return (
        ("ACT", CUDA_TYPES[activation]),
        ("STATE", CUDA_TYPES[state]),
        ("RING", CUDA_TYPES[ring]),
        ("HEADS", a.num_heads),
        ("HEAD_DIM", a.head_dim),
        ("STATE_SIZE", a.state_size),
        ("GROUPS", a.n_groups),
        ("RING_ROWS", a.ring_rows),
        ("DT_MIN", f"{float(a.dt_min)!r}f"),
        ("DT_MAX", NO_CLAMP if math.isinf(a.dt_max) else f"{float(a.dt_max)!r}f"),
    )


def launch_record(
    a: Mamba2Attributes,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
) -> Launch:
    """strides: token strides of xbc and dt, then slot strides of state, ring_x, ring_b and ring_dt, in elements."""
    kernel = Kernel("mamba2_recurrent.cu", "mamba2_recurrent", 128, defines(a, activation, state, ring))
    return Launch(kernel, (-(-a.num_heads * a.head_dim // 4), rows, 1), (tokens, *strides, 0))


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
    """See plugins/reference/mamba2.py. ``xbc`` and ``dt`` may be slices of wider tokens."""
    a = attributes
    rows, tokens, _ = xbc.shape
    y = torch.empty(rows, tokens, a.num_heads * a.head_dim, dtype=xbc.dtype, device=xbc.device)
    bound = tuple(pools[name] for name in ("state", "ring_x", "ring_b", "ring_dt"))
    strides = (token_stride(xbc), token_stride(dt), *map(slot_stride, bound))
    state, ring = pools["state"].dtype, pools["ring_x"].dtype
    record = launch_record(a, xbc.dtype, state, ring, rows, tokens, strides)
    launch(record, (xbc, dt, A_log, dt_bias, D, step, *bound), (y, *bound))
    return y
