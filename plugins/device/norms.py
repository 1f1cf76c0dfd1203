"""RMS norms of the embedded engine on the GPU, fused with the sum or the gate beside them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch

#: MODE of rms_norm.cu.
Mode = Literal["plain", "sum", "gate_before", "gate_after"]
MODES: tuple[Mode, ...] = ("plain", "sum", "gate_before", "gate_after")
#: Elements that a thread keeps at most; wider vectors get more threads.
KEPT = 16


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    out_dtype: torch.dtype,
    second: Tensor | None = None,
    mode: Mode = "plain",
    groups: int = 1,
    zero_centred: bool = False,
    sigmoid: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of ``x [tokens, groups * width]`` over each group, and the sum that it is of (``x`` itself but for ``sum``).

    x and second ``[tokens, groups * width]`` may be slices of wider tokens. second: summand or gate, as ``mode`` says.
    weight: ``[width]`` for every group, or ``[groups * width]``. sigmoid: the gate's activation, otherwise silu.
    """
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=out_dtype, device=x.device)
    total = torch.empty_like(out, dtype=x.dtype) if mode == "sum" else x
    other = x if second is None else second
    strides = (x.stride(0), other.stride(0))
    kernel = variant(
        (x.dtype, other.dtype, weight.dtype, out_dtype),
        channels // groups,
        groups,
        widest(channels // groups, x, other, weight),
        epsilon,
        mode,
        shared_weight=weight.numel() * groups == channels,
        zero_centred=zero_centred,
        sigmoid=sigmoid,
    )
    vectors = tokens * groups
    per_block = kernel.block // threads_of(dict(kernel.defines))
    record = Launch(kernel, (-(-vectors // per_block), 1, 1), (vectors, *strides))
    launch(record, (x, second, weight), (out, total))
    return out, total


def threads_of(defines: dict[str, str | int | float]) -> int:
    return int(defines["THREADS"])


def widest(width: int, *tensors: Tensor) -> int:
    """Elements a thread may move at once: 4 where every vector and row starts on their alignment, otherwise 2 or 1."""
    for vector in (4, 2):
        strides = [t.stride(0) for t in tensors if t.ndim > 1]
        starts = [t.data_ptr() % (vector * t.itemsize) for t in tensors]
        if width % vector == 0 and not any(starts) and all(stride % vector == 0 for stride in strides):
            return vector
    return 1


def variant(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    width: int,
    groups: int,
    vector: int,
    epsilon: float,
    mode: Mode,
    shared_weight: bool,
    zero_centred: bool = False,
    sigmoid: bool = False,
) -> Kernel:
    """dtypes: of x, second, weight and the result."""
    threads = 32
    while threads < 1024 and threads * KEPT < width:
        threads *= 2
    x, second, weight, out = (CUDA_TYPES[dtype] for dtype in dtypes)
    defines = (
        ("X", x),
        ("Y", second),
        ("WEIGHT", weight),
        ("OUT", out),
        ("WIDTH", width),
        ("GROUPS", groups),
        ("THREADS", threads),
        ("VECTOR", vector),
        ("EPSILON", f"{float(epsilon)!r}f"),
        ("ZERO_CENTRED", int(zero_centred)),
        ("SHARED_WEIGHT", int(shared_weight)),
        ("MODE", MODES.index(mode)),
        ("SIGMOID", int(sigmoid)),
    )
    return Kernel("rms_norm.cu", "rms_norm", max(threads, 128), defines)


def variants() -> list[Kernel]:
    """Residual streams, and the gated norms of Nemotron-3 Nano, Qwen3.5-35B and Kimi Linear."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        variant((bf16, bf16, bf16, bf16), 2688, 1, 4, 1e-5, "plain", True),
        *(
            variant((x, bf16, bf16, bf16), width, 1, 4, 1e-5, "sum", True)
            for x in (bf16, fp32)
            for width in (2048, 2688)
        ),
        variant((bf16, bf16, bf16, bf16), 512, 8, 4, 1e-5, "gate_before", False),
        variant((bf16, bf16, bf16, bf16), 128, 32, 4, 1e-6, "gate_after", True),
        variant((bf16, bf16, bf16, bf16), 128, 32, 4, 1e-6, "gate_after", True, sigmoid=True),
        variant((bf16, bf16, bf16, bf16), 256, 16, 4, 1e-6, "plain", True, zero_centred=True),
        variant((fp32, fp32, fp32, fp32), 8192, 1, 4, 1e-5, "sum", True),
    ]
