"""A GPU that torch does not have: what tests ask of ``cuda`` is done on the CPU, and kernels are emulated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from emulator.launcher import Emulation, launch
from trtllm_replayssm.plugins import driver
from trtllm_replayssm.plugins.launch import Launch


class CpuForCuda(TorchFunctionMode):
    """Functions of torch that are asked for the device ``cuda`` give tensors of the CPU. ``Tensor.cuda`` copies, as to one."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return arguments[0].clone(memory_format=torch.preserve_format)
        keywords = {name: on_cpu(value) for name, value in (keywords or {}).items()}
        return function(*(on_cpu(value) for value in arguments), **keywords)


def on_cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class CpuGenerator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> CpuGenerator:
        return super().__new__(cls, on_cpu(device))


class EmulatedGpu:
    """Within this context the device ``cuda`` works as far as kernels and tensors need it. ``emulation``: how kernels run."""

    def __init__(self, emulation: Emulation | None = None) -> None:
        self.emulation = emulation or Emulation()
        self._context = ExitStack()

    def __enter__(self) -> EmulatedGpu:
        patch = self._context.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(driver, "launch_at", self._launch_at)
        patch.setattr(torch, "Generator", CpuGenerator)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        self._context.enter_context(CpuForCuda())
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()

    def _launch_at(
        self, record: Launch, device: int, inputs: Sequence[int], outputs: Sequence[int], stream: int
    ) -> None:
        launch(record, inputs, outputs, self.emulation)
