"""Launches kernels on torch tensors, on torch's current stream, without waiting for the device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.plugins.compiler import architecture, checked, compile_kernel
from trtllm_replayssm.plugins.launch import Kernel, Launch


def launch(record: Launch, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
    """Start ``record`` on the tensors' device. None stands for an optional input that is absent.

    The first launch of a kernel on a device compiles and loads it; do one before a CUDA graph is captured.
    """
    device = outputs[0].device
    read = [0 if tensor is None else tensor.data_ptr() for tensor in inputs]
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        launch_at(record, device.index or 0, read, [tensor.data_ptr() for tensor in outputs], stream)


def launch_at(record: Launch, device: int, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
    """Start ``record`` at addresses of the current device, on a stream given by its handle."""
    from cuda.bindings import driver

    function = loaded_function(record.kernel, device)
    values = (*inputs, *record.integers, *outputs)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    types = (pointer,) * len(inputs) + (integer,) * len(record.integers) + (pointer,) * len(outputs)
    shape = (*record.grid, record.kernel.block, 1, 1, record.kernel.dynamic_shared)
    checked(driver.cuLaunchKernel(function, *shape, stream, (values, types), 0))


@cache
def loaded_function(kernel: Kernel, device: int) -> Any:
    """The driver's handle of a kernel, compiled and loaded into the primary context of ``device``."""
    from cuda.bindings import driver

    binary = compile_kernel(kernel, architecture(*torch.cuda.get_device_capability(device)))
    module = checked(driver.cuModuleLoadData(binary.cubin))
    function = checked(driver.cuModuleGetFunction(module, kernel.symbol.encode()))
    if kernel.dynamic_shared:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, limit, kernel.dynamic_shared))
    return function
