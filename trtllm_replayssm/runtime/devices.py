"""The device an engine runs on: which one, how much of its memory is free, and whether an engine fits."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import EngineError

#: Files in which Linux states a container's limit and use, newest scheme first.
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device itself, or by default this process's GPU where there is one. Raises EngineError when it is not there."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        where = torch.device(device)
    except RuntimeError:
        raise EngineError(f"device {device!r} is not known", "use cpu, cuda or cuda:N") from None
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= count:
            raise EngineError(f"device {where} is not there; this machine has {count} CUDA devices", "use --device cpu")
        return torch.device("cuda", where.index or 0)
    if where.type != "cpu":
        raise EngineError(f"device {where} is not supported", "use cpu, cuda or cuda:N")
    return where


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """The device as CUDA's current one inside a block, for libraries that take whichever is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None where the system does not tell."""
    if device.type == "cuda":
        # What torch keeps for later allocations is not free for the driver, but it is for torch.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    limits = [free for free in (system_available(), container_available()) if free is not None]
    return min(limits, default=None)


def system_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def container_available() -> int | None:
    for limit, used in CGROUP_FILES:
        try:
            return int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return None


def check_memory(device: torch.device, weights: int, slots: int, slot_bytes: int, built: bool = True) -> None:
    """Raises EngineError when weights (bytes) and the state of ``slots`` requests do not fit into the device's free memory.

    built: whether the sizes are those of an earlier build, or given with the command that runs now.
    """
    available, state = available_bytes(device), slots * slot_bytes
    if available is None or weights + state <= available:
        return
    parts = (
        f"{bytes_text(weights)} of weights and {bytes_text(state)} of state"
        if weights
        else f"{bytes_text(state)} of state"
    )
    build, convert = ("build with", "convert with a larger --tp_size") if built else ("give", "a larger --tp_size")
    hint = f"use a larger machine, or more ranks: {convert}"
    if weights + slot_bytes <= available:
        fitting = (available - weights) // slot_bytes
        hint = f"{build} --max_batch_size {fitting} or less, or a smaller --max_seq_len"
    elif weights <= available:
        hint = f"{build} a smaller --max_seq_len, or {hint}"
    raise EngineError(f"the engine needs {parts}, but {device} has {bytes_text(available)} free", hint)
