"""Variants and launches of the ordinary recurrences, which layers with a window of 1 are.

With a window of 1 and no room for drafts, a step of one token finds an empty ring and takes its token up
(plugins/advance.py). Then the state is read and written once, and no ring is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, Macros

if TYPE_CHECKING:
    from trtllm_replayssm.plugins.device.delta_rule import DeltaShape

#: Threads of a block: four warps, each with some rows of the state.
THREADS = 128
#: Bytes that a lane moves with one access.
ACCESS_BYTES = 16


def is_standard(window: int, ring_rows: int, tokens: int) -> bool:
    return window == ring_rows == tokens == 1


def warp_rows(dims: tuple[int, int], state: torch.dtype) -> int:
    """Rows of a head's state ``[rows, columns]`` that a warp holds (plugins/cuda/state_rows.cuh).

    0 for a shape that does not divide into accesses and lanes.
    """
    rows, columns = dims
    vectors = columns * state.itemsize // ACCESS_BYTES
    lanes = min(vectors, 32)
    if columns * state.itemsize % ACCESS_BYTES or vectors % lanes or 32 % lanes:
        return 0
    # Accesses under way: 16-bit elements take twice their registers when they are worked on.
    held = 2 * state.itemsize * lanes // vectors
    while held and rows % (32 // lanes * held):
        held //= 2
    return 32 // lanes * held


def mamba2_standard(
    shape: Macros, heads: int, dims: tuple[int, int], state: torch.dtype, rows: int, integers: tuple[int, ...]
) -> Launch:
    """shape: macros of mamba2_standard.cu. dims: head_dim and state_size. integers: as for the layer's other kernels."""
    return record("mamba2_standard", shape, heads, dims, state, rows, integers)


def delta_standard(
    shape: DeltaShape, activation: torch.dtype, state: torch.dtype, rows: int, integers: tuple[int, ...]
) -> Launch:
    macros: Macros = (
        ("ACT", CUDA_TYPES[activation]),
        ("STATE", CUDA_TYPES[state]),
        ("KEY_HEADS", shape.key_heads),
        ("VALUE_HEADS", shape.value_heads),
        ("KEY_DIM", shape.key_dim),
        ("VALUE_DIM", shape.value_dim),
        ("PER_CHANNEL", int(shape.per_channel)),
        *shape.macros,
    )
    dims = (shape.value_dim, shape.key_dim)
    return record("delta_standard", macros, shape.value_heads, dims, state, rows, integers)


def record(
    symbol: str,
    macros: Macros,
    heads: int,
    dims: tuple[int, int],
    state: torch.dtype,
    rows: int,
    integers: tuple[int, ...],
) -> Launch:
    in_warp, warps = warp_rows(dims, state), THREADS // 32
    kernel = Kernel(f"{symbol}.cu", symbol, THREADS, macros, in_flight=warps * in_warp * dims[1] * state.itemsize)
    return Launch(kernel, (-(-heads * dims[0] // (warps * in_warp)), rows, 1), integers)
