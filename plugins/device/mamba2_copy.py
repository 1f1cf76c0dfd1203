"""``replayssm::mamba2`` for decode and verify steps of layers with a read copy: variant and launch.

The kernel is plugins/cuda/mamba2_copy_step.cu, the copy's contract plugins/read_copy.py.
"""

from __future__ import annotations

import torch

from trtllm_replayssm.plugins.launch import Kernel, Launch, Macros
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import FORMATS

#: Blocks that a device should be given before a block takes more heads: two for each of some 130 multiprocessors.
BLOCKS_WANTED = 256


def read_bits(a: Mamba2Attributes) -> int:
    """Bits of a code of the layer's read copy; 0 without one."""
    return 0 if a.read_dtype == "same" else FORMATS[a.read_dtype].bits


def copy_step_record(
    a: Mamba2Attributes,
    shape: Macros,
    state: torch.dtype,
    rows: int,
    tokens: int,
    entries: int,
    head_counts: list[int],
    integers: tuple[int, ...],
) -> Launch:
    """shape: macros of sizes and element types. entries: longest history and step of a row. head_counts: heads that a block
    may take. integers: T and the strides."""
    warps = a.head_dim // 16
    tuned = (
        ("TOKENS", tokens),
        ("ENTRIES", entries),
        ("HEADS_A_BLOCK", max(head_counts)),
        ("WARPS_AN_SM", max(warps, step_warps(a, state, tokens, entries))),
    )
    in_flight = a.head_dim * a.state_size * read_bits(a) // 8 * warps
    kernel = Kernel("mamba2_copy_step.cu", "mamba2_copy_step", 32 * warps, (*shape, *tuned), in_flight)
    heads = max(n for n in head_counts if n == 1 or rows * a.num_heads // n >= BLOCKS_WANTED)
    return Launch(kernel, (a.num_heads // heads, rows, 1), (*integers, heads))


def step_warps(a: Mamba2Attributes, state: torch.dtype, tokens: int, entries: int) -> int:
    """Warps a multiprocessor should hold, by which registers are divided: as many as fit without spilling."""
    wide = a.state_size > 128 or a.head_dim > 64 or tokens > 8 or entries > 24 or a.stochastic_rounding
    if wide or (read_bits(a) == 8 and (tokens not in (2, 3, 4) or state.itemsize == 2)):
        return 8
    return 16 if tokens == 1 and entries <= 16 and state.itemsize == 4 else 12
