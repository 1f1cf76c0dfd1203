"""CUDA implementation of ``replayssm::mamba2``; the contract is in plugins/mamba2.py."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride, token_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

#: Largest finite float32: "no upper clamp" in the kernels.
NO_CLAMP = "3.4028235e38f"
#: Warps a multiprocessor should hold; registers are divided by this. Measured best on H200.
WARPS_AN_SM = {1: 16, 8: 12, MAX_VERIFY_TOKENS: 8}
#: Warps a device should be given before a block takes more than one head.
WARPS_WANTED = 16384


def uses_step_kernel(a: Mamba2Attributes, activation: torch.dtype, ring: torch.dtype, tokens: int) -> bool:
    """Whether the matrix-product kernel takes this case; the plain recurrence takes the others."""
    narrow = activation.itemsize == 2 and ring == activation
    fits = a.head_dim % 16 == 0 and a.head_dim <= 256 and a.state_size in (32, 64, 128, 256)
    return narrow and fits and tokens <= MAX_VERIFY_TOKENS


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
    shape = (
        ("ACT", CUDA_TYPES[activation]),
        ("STATE", CUDA_TYPES[state]),
        ("HEADS", a.num_heads),
        ("HEAD_DIM", a.head_dim),
        ("STATE_SIZE", a.state_size),
        ("GROUPS", a.n_groups),
        ("RING_ROWS", a.ring_rows),
        ("DT_MIN", f"{float(a.dt_min)!r}f"),
        ("DT_MAX", NO_CLAMP if math.isinf(a.dt_max) else f"{float(a.dt_max)!r}f"),
    )
    if not uses_step_kernel(a, activation, ring, tokens):
        kernel = Kernel("mamba2_recurrent.cu", "mamba2_recurrent", 128, (*shape, ("RING", CUDA_TYPES[ring])))
        return Launch(kernel, (-(-a.num_heads * a.head_dim // 4), rows, 1), (tokens, *strides, 0))
    # With drafts the ring holds the whole window before a step; without, the step that would fill it folds.
    history = a.window if a.ring_rows > a.window else a.window - 1
    warps = next(warps for limit, warps in WARPS_AN_SM.items() if tokens <= limit)
    tuned = (("TOKENS", tokens), ("ENTRIES", history + tokens), ("WARPS_AN_SM", max(warps, a.head_dim // 16)))
    in_flight = min(4096, 16 * a.state_size * state.itemsize) * (a.head_dim // 16)
    kernel = Kernel("mamba2_step.cu", "mamba2_step", 2 * a.head_dim, (*shape, *tuned), in_flight)
    heads = heads_per_block(a, rows)
    return Launch(kernel, (a.num_heads // heads, rows, 1), (tokens, *strides, heads))


def heads_per_block(a: Mamba2Attributes, rows: int) -> int:
    """Heads of one group that a block takes: as many as leave the device enough warps, for they share the ring's B."""
    in_group = a.num_heads // a.n_groups
    warps = rows * a.num_heads * a.head_dim // 16
    return max(n for n in range(1, min(in_group, 32) + 1) if in_group % n == 0 and (n == 1 or warps // n >= WARPS_WANTED))


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
    record = launch_record(a, xbc.dtype, pools["state"].dtype, pools["ring_x"].dtype, rows, tokens, strides)
    launch(record, (xbc, dt, A_log, dt_bias, D, step, *bound), (y, *bound))
    return y


def variants() -> list[Kernel]:
    """Nemotron-3 Nano and Super on one GPU, other head and state sizes, and the plain kernel that takes the rest."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    nano, super_, narrow, odd = (64, 64, 128, 8), (128, 64, 128, 8), (32, 80, 128, 1), (24, 48, 40, 1)
    small, wide, long = (64, 32, 64, 4), (32, 128, 128, 2), (64, 64, 256, 8)
    cases = [
        *product((nano, super_), ((bf16, fp32), (bf16, bf16), (fp16, fp16), (fp16, fp32)), (1, 4, 8, 16)),
        *product((narrow, small, wide, long), ((bf16, fp32), (bf16, bf16)), (1, 8)),
        *product((nano, odd), ((fp32, fp32), (bf16, fp32)), (1, 64)),
    ]
    kernels = []
    for (heads, head_dim, state_size, groups), (activation, state), tokens in cases:
        draft = tokens if 1 < tokens <= MAX_VERIFY_TOKENS else 0
        a = Mamba2Attributes(heads, head_dim, state_size, groups, 16, 16 + draft)
        kernels.append(launch_record(a, activation, state, activation, 1, tokens, (0,) * 6).kernel)
    return list(dict.fromkeys(kernels))
