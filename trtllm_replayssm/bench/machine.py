"""Where a benchmark ran: processor, GPU, and the versions that its figures depend on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.doctor import installed

#: Distributions whose versions figures depend on, where they are installed.
DISTRIBUTIONS = (
    *("trtllm-replayssm", "torch", "cuda-bindings", "nvidia-cuda-nvrtc", "triton", "tensorrt", "tensorrt-rtx", "numpy"),
    "transformers",
)
#: nvidia-smi's names of what a GPU did while it was looked at.
GPU_QUERY = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.mem",
    "power.limit",
    "clocks_throttle_reasons.active",
)


def machine_info(device: torch.device) -> dict[str, Any]:
    """name, memory.total (GiB) and clocks.mem (GHz) as in trtllm-bench, of the device that ran; versions and date."""
    info: dict[str, Any] = {
        "name": processor_name(),
        "memory.total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "clocks.mem": None,
        "cpu": processor_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in DISTRIBUTIONS if (version := installed(name)) is not None},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        properties, smi = torch.cuda.get_device_properties(device), gpu_state(device)
        info |= {
            "name": properties.name,
            "memory.total": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "gpu": smi,
        }
        if (clock := smi.get("clocks.max.mem", "").removesuffix(" MHz")).isdigit():
            info["clocks.mem"] = int(clock) / 1000
    return info


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpu_state(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says of the device; empty where it is not installed."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    which = f"GPU-{uuid}" if uuid else str(device.index or 0)
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GPU_QUERY, (value.strip() for value in done.stdout.split(","))))
