"""Compiles a kernel variant with NVRTC to PTX and machine code. Needs neither a GPU nor a CUDA toolkit.

The sources under ``cuda/`` include no header but each other, so that the NVRTC library alone compiles them. The PTX goes
into TensorRT engines, the machine code is what the embedded engine loads; both come from the same compilation.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_replayssm.errors import EngineError, pip_extra
from trtllm_replayssm.plugins.launch import Kernel

#: Architectures that kernels are released and checked for. Others of compute capability 9.0 or more should work as well.
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")

SOURCE_FOLDER = Path(__file__).parent / "cuda"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: PTX text, machine code of one architecture, and the assembler's report."""

    ptx: bytes
    cubin: bytes
    log: str

    @property
    def registers(self) -> int:
        return self._number(r"Used (\d+) registers")

    @property
    def spill_bytes(self) -> int:
        return self._number(r"(\d+) bytes spill stores") + self._number(r"(\d+) bytes spill loads")

    @property
    def stack_bytes(self) -> int:
        return self._number(r"(\d+) bytes stack frame")

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        return self._number(r"(\d+) bytes smem", 0)

    def _number(self, pattern: str, default: int | None = None) -> int:
        found = re.search(pattern, self.log)
        if found is None and default is None:
            raise ValueError(f"the assembler's report has no {pattern!r}:\n{self.log}")
        return int(found[1]) if found else default or 0


def architecture(major: int, minor: int) -> str:
    """The architecture to compile for on a device of this compute capability.

    Raises EngineError below 9.0, where the bulk copies that the kernels use do not exist.
    """
    if major < 9:
        raise EngineError(
            f"the CUDA kernels need compute capability 9.0 or more, this GPU has {major}.{minor}",
            "--plugin_impl reference runs anywhere",
        )
    name = f"sm_{major}{minor}"
    return f"{name}a" if f"{name}a" in ARCHITECTURES else name


def check_architecture(name: str) -> None:
    """Raises EngineError for an architecture that the kernels, or the installed NVRTC, cannot be compiled for."""
    found = re.fullmatch(r"sm_(\d+)([af]?)", name)
    number = int(found[1]) if found else 0
    # Code for a family of architectures came with compute capability 10.0.
    suited = found and number >= (100 if found[2] == "f" else 90)
    if not suited or number not in checked(load_nvrtc().nvrtcGetSupportedArchs()):
        raise EngineError(
            f"the CUDA kernels cannot be compiled for the architecture {name!r}",
            f"they are released for {', '.join(ARCHITECTURES)}; NVRTC {nvrtc_version()} is installed",
        )


def compile_kernel(kernel: Kernel, arch: str) -> Binary:
    """Compile ``kernel`` for ``arch``, or fetch it from the user's cache folder.

    Raises EngineError when NVRTC is not installed or the folder cannot be written, and RuntimeError with NVRTC's messages
    when the source does not compile.
    """
    options = compile_options(kernel, arch)
    key = cache_key(kernel, options)
    stem = cache_folder() / f"{kernel.symbol}-{arch}-{key}"
    paths = [stem.with_suffix(suffix) for suffix in (".ptx", ".cubin", ".log")]
    if all(path.exists() for path in paths):
        ptx, cubin, log = (path.read_bytes() for path in paths)
        return Binary(ptx, cubin, log.decode())
    binary = run_nvrtc(kernel, options)
    try:
        for path, content in zip(paths, (binary.ptx, binary.cubin, binary.log.encode()), strict=True):
            write_atomically(path, content)
    except OSError as error:
        raise EngineError(
            f"the kernels cannot be kept in {cache_folder()}: {error.strerror}",
            "set XDG_CACHE_HOME to a folder that can be written and has space",
        ) from None
    return binary


def compile_options(kernel: Kernel, arch: str) -> tuple[str, ...]:
    macros = tuple(f"-D{name}={value}" for name, value in kernel.defines)
    # NVRTC's own cache answers without the assembler's report, which the registers are read from; ours keeps it.
    report = ("--no-cache", "--ptxas-options=-v")
    fixed = ("--std=c++17", "-default-device", f"--include-path={SOURCE_FOLDER}", *report)
    return (f"--gpu-architecture={arch}", *fixed, *macros)


def cache_key(kernel: Kernel, options: tuple[str, ...]) -> str:
    """Everything that decides the machine code: the sources, the options and the compiler's version."""
    digest = hashlib.sha256()
    relevant = [option for option in options if not option.startswith("--include-path")]
    for part in (*relevant, nvrtc_version()):
        digest.update(part.encode() + b"\0")
    for name, text in sources(kernel.source).items():
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()[:24]


def sources(name: str, found: dict[str, bytes] | None = None) -> dict[str, bytes]:
    """A source file and everything it includes, by name."""
    found = {} if found is None else found
    if name not in found:
        found[name] = (SOURCE_FOLDER / name).read_bytes()
        for included in re.findall(rb'^#include "(.+)"', found[name], re.MULTILINE):
            sources(included.decode(), found)
    return found


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trtllm_replayssm" / "kernels"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that no reader, in this process or another, ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        # Nobody would ever remove it: its name is random.
        os.unlink(temporary)
        raise


# ---- NVRTC -----------------------------------------------------------------------------------------------------------


def load_nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise EngineError(f"the CUDA kernels cannot be compiled: {error}", pip_extra("cuda")) from None
    return nvrtc


@lru_cache
def nvrtc_version() -> str:
    _, major, minor = load_nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def run_nvrtc(kernel: Kernel, options: tuple[str, ...]) -> Binary:
    nvrtc = load_nvrtc()
    text = (SOURCE_FOLDER / kernel.source).read_bytes()
    program = checked(nvrtc.nvrtcCreateProgram(text, kernel.source.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{kernel.source} does not compile with {' '.join(options)}:\n{log}")
        ptx = fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
        cubin = fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Binary(ptx, cubin, log)


def fetch(size_of: Callable[..., Any], read: Callable[..., Any], program: Any) -> bytes:
    content = bytes(checked(size_of(program)))
    checked(read(program, content))
    return content


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a CUDA call's result tuple, or RuntimeError with the status it reports."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status!r}")
    return values[0] if len(values) == 1 else tuple(values)
