"""Linear layers of float32 engines in steps of few tokens, for which a matrix product's tiles leave most of a GPU idle."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import Kernel, Launch

#: Most rows of x that the kernel takes.
MOST_ROWS = 16
#: Rows of the weight that a block of four warps takes.
BLOCK_OUTPUTS = 8


def suited(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether ``row_linear`` takes x ``[rows, in]``, weight ``[out, in]`` and bias ``[out]``."""
    floats = all(tensor is None or tensor.dtype == torch.float32 for tensor in (x, weight, bias))
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 4 == 0 for tensor in (x, weight))
    dense = weight.is_contiguous() and x.stride(1) == 1
    fits = 0 < len(x) <= MOST_ROWS and x.shape[1] == weight.shape[1] and x.shape[1] % 4 == 0
    return floats and fits and aligned and dense


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight^T + bias`` ``[rows, out]``; see ``suited``."""
    (rows, width), outputs = x.shape, len(weight)
    y = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    integers = (rows, x.stride(0), outputs)
    record = Launch(kernel_for(width, rows, bias is not None), (-(-outputs // BLOCK_OUTPUTS), 1, 1), integers)
    launch(record, (x, weight, bias), (y,))
    return y


def kernel_for(width: int, rows: int, bias: bool) -> Kernel:
    """rows: rounded up to a power of two, so that few variants are compiled."""
    defines = (("IN", width), ("ROWS", 1 << (rows - 1).bit_length()), ("BIAS", int(bias)))
    return Kernel("row_linear.cu", "row_linear", 128, defines)


def variants() -> list[Kernel]:
    return [kernel_for(256, 8, False), kernel_for(4096, 1, True), kernel_for(4096, MOST_ROWS, False)]
