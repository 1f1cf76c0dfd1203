"""The kernel variant and launch of ``replayssm::mamba2`` for rows of many tokens (plugins/cuda/mamba2_prefill.cu)."""

from __future__ import annotations

import torch

from trtllm_replayssm.plugins.launch import Kernel, Launch, Macros
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: Of an H100 and an H200; of a B300, 160.
MULTIPROCESSORS = 132


def prefill_record(
    a: Mamba2Attributes,
    shape: Macros,
    activation: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
) -> Launch:
    """shape: macros of sizes and element types. strides: as in ``device.mamba2.launch_record``."""
    chunk, channels = chunk_shape(a)
    threads, blocks = 2 * chunk, a.num_heads * a.head_dim // channels
    tuned = (
        ("CHUNK", chunk),
        ("CHANNELS", channels),
        ("CHANNEL_PARTS", 1),
        ("BLOCKS_AN_SM", blocks_an_sm(a, threads, activation, rows * blocks)),
    )
    kernel = Kernel("mamba2_prefill.cu", "mamba2_prefill", threads, (*shape, *tuned))
    return Launch(kernel, (blocks, rows, 1), (tokens, *strides, 0))


def chunk_shape(a: Mamba2Attributes) -> tuple[int, int]:
    """Entries that a block takes up at once, and rows of the state that it holds: as many as fit its shared memory."""
    if a.state_size > 128:
        return 32, 16
    return 64, 32 if a.head_dim % 32 == 0 else 16


def blocks_an_sm(a: Mamba2Attributes, threads: int, activation: torch.dtype, grid: int) -> int:
    """Blocks that must fit on a multiprocessor, which bounds a thread's registers: three where the grid has as many.

    float16 is taken apart in registers, and the scale of an nvfp4 head takes some more than the bound of three blocks.
    """
    narrow = threads == 128 and activation == torch.bfloat16 and a.read_dtype != "nvfp4"
    three = narrow and grid > 2 * MULTIPROCESSORS
    return (384 if three else 256) // threads
