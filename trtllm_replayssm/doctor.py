"""What this machine has, what it can therefore run, and the command that brings what is missing.

Probes never raise: a package that is broken is a finding like one that is absent.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import UserError, pip_extra
from trtllm_replayssm.triton.installation import HINT, PACKAGE, installed_server, package_folder

#: First release of TensorRT-LLM without an engine builder.
TRTLLM_WITHOUT_BUILDER = (1, 3)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. value: what is there, or why it is not usable. mend: command that brings it."""

    name: str
    present: bool
    value: str
    mend: str = ""


@dataclass(frozen=True)
class Capability:
    """One thing a user may want to run here. missing: what stands in the way. mend: commands, in order."""

    name: str
    available: bool
    missing: tuple[str, ...]
    mend: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    capabilities: tuple[Capability, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(folder: Path | None = None) -> Diagnosis:
    """Looks at everything. folder: where checkpoints and engines would be written, for the disk's size."""
    findings = {finding.name: finding for finding in (probe() for probe in PROBES)}
    disk = probe_disk(folder or Path.cwd())
    return Diagnosis((*findings.values(), disk), tuple(judge(name, findings) for name in NEEDS))


def judge(capability: str, findings: dict[str, Finding]) -> Capability:
    needed = [findings[name] for name in NEEDS[capability]]
    absent = [finding for finding in needed if not finding.present]
    missing = [f"{finding.name}: {finding.value}" for finding in absent]
    return Capability(
        capability, not missing, tuple(missing), tuple(finding.mend for finding in absent if finding.mend)
    )


# ---- probes ----------------------------------------------------------------------------------------------------------


def probe_python() -> Finding:
    version = platform.python_version()
    mend = "install Python 3.10 to 3.13, then: make PYTHON=python3.12"
    return Finding("Python", (3, 10) <= sys.version_info[:2] < (3, 14), f"{version} ({sys.executable})", mend)


def probe_torch() -> Finding:
    mend = "pip install 'torch>=2.9,<3'"
    try:
        torch = import_module("torch")
    except Exception as error:
        return Finding("torch", False, failure(error), mend)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", True, f"{torch.__version__}, {build}", mend)


def probe_gpu() -> Finding:
    """GPUs as the driver lists them, so that a CPU build of torch does not hide them."""
    mend = "install NVIDIA's driver, release 580 or newer, or use a machine with a GPU"
    try:
        command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        return Finding("NVIDIA GPU", False, "nvidia-smi is not installed", mend)
    except (OSError, subprocess.SubprocessError):
        return Finding("NVIDIA GPU", False, "nvidia-smi finds no GPU", mend)
    lines = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 3]
    if not lines:
        return Finding("NVIDIA GPU", False, "nvidia-smi finds no GPU", mend)
    name, capability, driver, memory = lines[0]
    value = f"{len(lines)} x {name}, compute capability {capability}, {memory}, driver {driver}"
    return Finding("NVIDIA GPU", True, value, mend)


def probe_torch_cuda() -> Finding:
    mend = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    try:
        torch = import_module("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        return Finding("torch on the GPU", False, failure(error), mend)
    return Finding("torch on the GPU", count > 0, f"{count} device(s)", mend)


def probe_nvrtc() -> Finding:
    mend = pip_extra("cuda")
    try:
        error, major, minor = import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as failed:
        return Finding("NVRTC", False, failure(failed), mend)
    if int(error) != 0:
        return Finding("NVRTC", False, f"does not answer: {error}", mend)
    return Finding("NVRTC", True, f"CUDA {major}.{minor}, cuda-bindings {installed('cuda-bindings')}", mend)


def probe_tensorrt() -> Finding:
    mend = pip_extra("tensorrt")
    try:
        found = import_module("trtllm_replayssm.compat").load_tensorrt(("tensorrt",))
    except UserError as error:
        return Finding("TensorRT", False, error.message, mend)
    except Exception as error:
        return Finding("TensorRT", False, failure(error), mend)
    return Finding("TensorRT", True, ".".join(map(str, found.version)), mend)


def probe_tensorrt_llm() -> Finding:
    """Not imported: that takes long, and starts MPI."""
    mend = f"{pip_extra('trtllm')} (Linux, Python 3.12)"
    version = installed("tensorrt-llm")
    if version is None:
        return Finding("TensorRT-LLM", False, "not installed", mend)
    spec = find_spec("tensorrt_llm")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    has_builder = folder is not None and (folder / "builder.py").exists()
    if version_tuple(version) >= TRTLLM_WITHOUT_BUILDER and not has_builder:
        return Finding("TensorRT-LLM", False, f"{version} has no trtllm-build any more", mend)
    return Finding("TensorRT-LLM", has_builder, version if has_builder else f"{version} is not complete", mend)


def probe_triton() -> Finding:
    if (path := installed_server()) is not None:
        return Finding("Triton server", True, str(path), HINT)
    if package_folder() is not None:
        return Finding("Triton server", True, f"in {PACKAGE} {installed(PACKAGE)}", HINT)
    return Finding("Triton server", False, f"tritonserver is not on PATH, and {PACKAGE} is not installed", HINT)


def probe_transformers() -> Finding:
    version = installed("transformers")
    present = version is not None and (5, 20) <= version_tuple(version) < (6,)
    mend = "pip install 'transformers>=5.20,<6'"
    return Finding("transformers", present, version or "not installed", mend)


def probe_machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding("machine", True, f"{platform.machine()}, {os.cpu_count()} CPUs, memory {bytes_text(memory)}")


def probe_disk(folder: Path) -> Finding:
    return Finding("disk", True, f"{bytes_text(shutil.disk_usage(folder).free)} free in {folder}")


def failure(error: Exception) -> str:
    """Why an import failed, in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return f"installed, but does not load: {' '.join(str(error).split())}"


def installed(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """``1.2.0rc3`` as ``(1, 2)``: the leading numbers, without what a pre-release adds."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


PROBES: tuple[Callable[[], Finding], ...] = (
    probe_machine,
    probe_python,
    probe_torch,
    probe_gpu,
    probe_torch_cuda,
    probe_nvrtc,
    probe_tensorrt,
    probe_tensorrt_llm,
    probe_triton,
    probe_transformers,
)

#: Findings that each capability needs.
NEEDS: dict[str, tuple[str, ...]] = {
    "embedded engine on the CPU": ("Python", "torch"),
    "embedded engine on a GPU": ("Python", "torch", "NVIDIA GPU", "torch on the GPU", "NVRTC"),
    "compiling the CUDA kernels": ("Python", "torch", "NVRTC"),
    "demo and tests": ("Python", "torch", "transformers"),
    "TensorRT engine": ("Python", "torch", "NVIDIA GPU", "NVRTC", "TensorRT"),
    "trtllm-build": ("Python", "torch", "NVIDIA GPU", "NVRTC", "TensorRT", "TensorRT-LLM"),
    "Triton server": ("Python", "torch", "Triton server"),
}
