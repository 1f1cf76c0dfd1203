"""``replayssm::mamba2`` for decode and verify steps of layers with a read copy: variant and launch.

The kernel is plugins/cuda/mamba2_copy_step.cu, the copy's contract plugins/read_copy.py.
"""

from __future__ import annotations

import torch

from trtllm_replayssm.plugins.device.mamba2_shape import step_launch
from trtllm_replayssm.plugins.launch import Launch, Macros
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
    integers: tuple[int, ...],
) -> Launch:
    """shape: macros of sizes and element types. entries: longest history and step of a row. integers: T and the
    strides."""
    in_flight = a.head_dim * a.state_size * read_bits(a) // 8 * (a.head_dim // 16)
    warps = step_warps(a, state, tokens, entries)
    return step_launch("mamba2_copy_step", a, shape, rows, tokens, entries, warps, BLOCKS_WANTED, in_flight, integers)


def step_warps(a: Mamba2Attributes, state: torch.dtype, tokens: int, entries: int) -> int:
    """Warps a multiprocessor should hold, by which registers are divided: as many as fit without spilling."""
    if a.state_size > 128 or a.head_dim > 64 or entries > 32 or a.stochastic_rounding:
        return 8
    if read_bits(a) == 8:
        return 8 if tokens > 8 and state.itemsize == 2 else 12
    return 12 if tokens > 8 else 16
