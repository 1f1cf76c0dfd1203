"""Kernel variants and launches of ``gated_delta`` and ``kda`` for rows of many tokens (plugins/cuda/delta_prefill.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trtllm_replayssm.plugins.launch import Kernel, Launch, Macros

if TYPE_CHECKING:
    from trtllm_replayssm.plugins.device.delta_rule import DeltaShape

#: Of an H100 and an H200; of a B300, 160.
MULTIPROCESSORS = 132
#: Value rows that a warp holds.
WARP_ROWS = 16
#: Key and value dimensions that the kernels take; with decays per channel wide keys alone.
DIMS = (64, 128)
CHANNEL_KEY_DIM = 128


def takes_prefill(shape: DeltaShape, activation: torch.dtype, ring: torch.dtype) -> bool:
    """Whether a kernel takes such a layer, if its tensors may be moved in vectors.

    With decays per channel queries are multiplied with them and become bfloat16, too coarse for float16 outputs.
    """
    known = shape.key_dim in DIMS and shape.value_dim in DIMS and not shape.derived_fold and activation == ring
    if shape.per_channel:
        return known and activation == torch.bfloat16 and shape.key_dim == CHANNEL_KEY_DIM
    return known and activation.itemsize == 2


def prefill_record(
    shape: DeltaShape, activation: torch.dtype, macros: Macros, rows: int, integers: tuple[int, ...]
) -> Launch:
    """macros: of sizes and element types, as delta_shape.cuh names them. integers: tokens and strides of the launch."""
    warps = row_warps(shape, activation, rows)
    split = shape.value_dim // (WARP_ROWS * warps)
    threads = 32 * (warps + maker_warps(shape))
    tuned = (
        ("TOKENS", 0),
        ("HEADS_A_BLOCK", 1),
        ("SPLIT", split),
        ("ROW_WARPS", warps),
        ("ALIGNED", 1),
        ("BLOCKS_AN_SM", blocks_an_sm(threads)),
    )
    kernel = Kernel(f"{shape.source}_prefill.cu", f"{shape.source}_prefill", threads, (*macros, *tuned))
    return Launch(kernel, (shape.value_heads * split, rows, 1), integers)


def maker_warps(shape: DeltaShape) -> int:
    """Warps of a block that hold no state."""
    return shape.key_dim // 32 if shape.per_channel else 2


def row_warps(shape: DeltaShape, activation: torch.dtype, rows: int) -> int:
    """Warps of a block that hold state: two, or all of a head's where every multiprocessor has a head.

    They share what the block's other warps make of a chunk. Of a head of 128 rows that leaves a thread 168 registers: too few
    where float16 is taken apart, or a copy is to be written.
    """
    if rows * shape.value_heads < MULTIPROCESSORS:
        return 2
    whole = shape.value_dim // WARP_ROWS
    return whole if activation == torch.bfloat16 and shape.read_dtype == "same" else min(whole, 4)


def blocks_an_sm(threads: int) -> int:
    """Blocks that must fit on a multiprocessor, which bounds a thread's registers."""
    return 2 if threads <= 128 else 1
