"""The kernel variant and launch of ``replayssm::mamba2`` for rows of many tokens (plugins/cuda/mamba2_prefill.cu)."""

from __future__ import annotations

import torch

from trtllm_replayssm.plugins.launch import Kernel, Launch
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes


def prefill_record(
    a: Mamba2Attributes,
    shape: tuple[tuple[str, str | int | float], ...],
    activation: torch.dtype,
    state: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
) -> Launch:
    """shape: macros of sizes and element types. strides: as in ``device.mamba2.launch_record``."""
    chunk, channels = chunk_shape(a)
    blocks = a.num_heads * a.head_dim // channels
    parts = 1
    tuned = (
        ("CHUNK", chunk),
        ("CHANNELS", channels),
        ("CHANNEL_PARTS", parts),
        ("BLOCKS_AN_SM", 2),
    )
    kernel = Kernel("mamba2_prefill.cu", "mamba2_prefill", 2 * chunk * parts, (*shape, *tuned))
    return Launch(kernel, (blocks, rows, 1), (tokens, *strides, 0))


def chunk_shape(a: Mamba2Attributes) -> tuple[int, int]:
    """Entries that a block takes up at once, and rows of the state that it holds: as many as fit its shared memory."""
    if a.state_size > 128:
        return 32, 16
    return 64, 32 if a.head_dim % 32 == 0 else 16
