"""Activations of the embedded engine on the GPU, each in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.norms import widest
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch


def gated(x: Tensor, gate: Tensor, sigmoid: bool) -> Tensor:
    """``x * act(gate)``, act being sigmoid or silu; both ``[tokens, width]``, slices of wider tokens or not."""
    return run(x, gate, kernel_for(x.dtype, gate.dtype, widest(x.shape[1], x, gate), 0, sigmoid))


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0)^2`` of x ``[tokens, width]``."""
    return run(x, None, kernel_for(x.dtype, x.dtype, widest(x.shape[1], x), 1, False))


def run(x: Tensor, gate: Tensor | None, kernel: Kernel) -> Tensor:
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    vector = int(dict(kernel.defines)["VECTOR"])
    strides = (x.stride(0), x.stride(0) if gate is None else gate.stride(0))
    launch(Launch(kernel, (tokens, -(-width // (128 * vector)), 1), (width, *strides)), (x, gate), (out,))
    return out


def kernel_for(x: torch.dtype, gate: torch.dtype, vector: int, mode: int, sigmoid: bool) -> Kernel:
    types = (("ACT", CUDA_TYPES[x]), ("Y", CUDA_TYPES[gate]))
    return Kernel(
        "elementwise.cu", "elementwise", 128, (*types, ("VECTOR", vector), ("MODE", mode), ("SIGMOID", int(sigmoid)))
    )


def variants() -> list[Kernel]:
    bf16 = torch.bfloat16
    return [
        kernel_for(bf16, bf16, 4, 0, False),
        kernel_for(bf16, bf16, 4, 0, True),
        kernel_for(bf16, bf16, 4, 1, False),
    ]
