"""Macros that all Mamba-2 kernels share, and the launch of those for decode and verify steps."""

from __future__ import annotations

import math

from trtllm_replayssm.plugins.launch import Kernel, Launch, Macros
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: Shared memory that a block may declare (a TensorRT plugin has no more), and that all blocks of a multiprocessor have.
BLOCK_SHARED_BYTES, SHARED_BYTES = 48 << 10, 220 << 10

#: Largest finite float32: "no upper clamp" in the kernels.
NO_CLAMP = "3.4028235e38f"


def size_macros(a: Mamba2Attributes) -> Macros:
    return (
        ("HEADS", a.num_heads),
        ("HEAD_DIM", a.head_dim),
        ("STATE_SIZE", a.state_size),
        ("GROUPS", a.n_groups),
        ("RING_ROWS", a.ring_rows),
        ("DT_MIN", f"{float(a.dt_min)!r}f"),
        ("DT_MAX", NO_CLAMP if math.isinf(a.dt_max) else f"{float(a.dt_max)!r}f"),
    )


def shared_bytes(a: Mamba2Attributes, tokens: int, entries: int) -> tuple[int, int]:
    """Shared memory that a block of a step declares (plugins/cuda/mamba2_weights.cuh): for itself, at most, and for each of
    its heads."""
    rows, blocks, tiles = 8 * -(-entries // 8), -(-entries // 16), -(-tokens // 8)
    block = 512 * blocks * tiles + 16 * a.state_size * tiles + rows * (2 * a.state_size + 16) + 256
    return block, rows * (2 * a.head_dim + 16) + blocks * (512 * tiles + 64) + 32 * tiles + 4 * rows + 12


def head_counts(a: Mamba2Attributes, tokens: int, entries: int, warps: int) -> list[int]:
    """Heads of a group that a block of a step may take: those whose shares of the sequence fit its shared memory, of which
    a multiprocessor is to hold ``warps`` warps."""
    block, head = shared_bytes(a, tokens, entries)
    limit = min(BLOCK_SHARED_BYTES, SHARED_BYTES * (a.head_dim // 16) // warps)
    in_group = a.num_heads // a.n_groups
    return [n for n in range(1, in_group + 1) if in_group % n == 0 and (n == 1 or block + n * head <= limit)]


def step_launch(
    symbol: str,
    a: Mamba2Attributes,
    shape: Macros,
    rows: int,
    tokens: int,
    entries: int,
    warps: int,
    blocks: int,
    in_flight: int,
    integers: tuple[int, ...],
) -> Launch:
    """entries: longest history and step of a row. warps: that a multiprocessor should hold, by which registers are divided.
    blocks: that the device should be given before a block takes more heads. integers: all but the last, a block's heads."""
    own = a.head_dim // 16
    resident = max(own, warps)
    counts = head_counts(a, tokens, entries, resident)
    tuned = (
        ("TOKENS", tokens),
        ("ENTRIES", entries),
        ("HEADS_A_BLOCK", max(counts)),
        ("WARPS_AN_SM", resident),
    )
    kernel = Kernel(f"{symbol}.cu", symbol, 32 * own, (*shape, *tuned), in_flight)
    heads = max(n for n in counts if n == 1 or rows * a.num_heads // n >= blocks)
    return Launch(kernel, (a.num_heads // heads, rows, 1), (*integers, heads))
