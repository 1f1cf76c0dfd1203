"""NCCL's communicator, which torch has made, for the collective layers of TensorRT."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist

from trtllm_replayssm.errors import EngineError


def communicator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The ncclComm_t of a process group as a capsule. Every rank must call this, because torch makes it when it is first used.

    Raises EngineError when torch does not lend it.
    """
    dist.barrier(group=group, device_ids=[device.index or 0])
    backend: Any = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise EngineError(
            f"torch {torch.__version__} does not lend the communicator of its {type(backend).__name__}",
            "tensor-parallel engines of TensorRT need torch's NCCL groups",
        )
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return capsule(backend._comm_ptr(), None, None)
