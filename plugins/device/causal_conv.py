"""CUDA implementation of ``replayssm::causal_conv``; the contract is in plugins/causal_conv.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride, token_stride

BLOCK = 128
#: Tokens of a row that one thread convolves; a longer prefill is divided among blocks.
CHUNK = 32


def launch_record(
    a: CausalConvAttributes,
    activation: torch.dtype,
    weight: torch.dtype,
    bias: bool,
    rows: int,
    tokens: int,
    x_stride: int,
    ring_stride: int,
    aligned: bool = True,
    starts: tuple[int, ...] = (),
) -> Launch:
    """aligned: the weights start on 16 bytes, as tensors of TensorRT and fresh torch tensors do.

    starts: addresses of x and the ring in elements, where these may not.
    """
    chunk = 1 if tokens == 1 else CHUNK
    vector = vector_width(activation, a.channels, x_stride, ring_stride, *starts)
    defines = (
        ("ACT", CUDA_TYPES[activation]),
        ("WEIGHT", CUDA_TYPES[weight]),
        ("CHANNELS", a.channels),
        ("KERNEL", a.kernel),
        ("CONV_ROWS", a.conv_rows),
        ("SILU", int(a.silu)),
        ("BIAS", int(bias)),
        ("VECTOR", vector),
        ("CHUNK", chunk),
        # A vector has a power of two of elements.
        ("ALIGNED", int(aligned and a.kernel.bit_count() == 1)),
    )
    kernel = Kernel("causal_conv.cu", "causal_conv", BLOCK, defines)
    grid = (-(-a.channels // (vector * BLOCK)), rows, -(-tokens // chunk))
    return Launch(kernel, grid, (tokens, x_stride, ring_stride))


def vector_width(dtype: torch.dtype, *elements: int) -> int:
    """Channels a thread moves at once: up to 8 bytes, as far as they divide all of ``elements``, at which rows may begin."""
    widest = 8 // dtype.itemsize
    return next(w for w in (widest, widest // 2, 1) if all(n % w == 0 for n in elements))


def causal_conv(
    attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, step: Tensor, conv_ring: Tensor
) -> Tensor:
    """See plugins/reference/conv.py. ``x`` may be a slice of wider tokens."""
    rows, tokens, channels = x.shape
    y = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    strides = token_stride(x), slot_stride(conv_ring)
    aligned = all(t.data_ptr() % 16 == 0 for t in (weight, bias) if t is not None)
    starts = tuple(t.data_ptr() // t.itemsize for t in (x, conv_ring))
    dtypes = (x.dtype, weight.dtype)
    record = launch_record(attributes, *dtypes, bias is not None, rows, tokens, *strides, aligned, starts)
    launch(record, (x, weight, bias, step, conv_ring), (y, conv_ring))
    return y


def variants() -> list[Kernel]:
    """Channel counts of Nemotron-3 Nano and Super, Qwen3.5-35B and Kimi Linear."""
    shapes = [(channels, dtype) for channels in (6144, 10240, 8192, 12288) for dtype in (torch.bfloat16, torch.float16)]
    shapes.append((6144, torch.float32))
    return [
        launch_record(CausalConvAttributes(channels, 4, 3 + tokens), dtype, dtype, True, 1, tokens, channels, 0).kernel
        for channels, dtype in shapes
        for tokens in (1, 4)
    ]
