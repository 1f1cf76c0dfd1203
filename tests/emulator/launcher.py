"""Compiles kernels for the host and launches them: the counterpart of plugins/compiler.py and plugins/driver.py."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trtllm_replayssm.plugins.compiler import SOURCE_FOLDER, cache_folder, sources
from trtllm_replayssm.plugins.launch import Kernel, Launch

DEVICE = Path(__file__).parent / "device"
#: Sanitizers tell of misaligned accesses, which are errors on a GPU, and of indices beyond arrays. The rest is what CUDA
#: promises and C++ does not.
FLAGS = (
    *("-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"),
    *("-Wno-unknown-pragmas", "-Wno-attributes"),
)
KERNEL_FLAGS = ("-O1", "-fvisibility=hidden", "-fsanitize=alignment,bounds", "-fno-sanitize-recover=all")
RUNTIME = ("grid.cpp", "fibers.cpp", "meetings.cpp", "copies.cpp", "matrices.cpp", "conversions.cpp", "sanitizer.cpp")
#: Macros by which NVRTC tells the architecture.
ARCHITECTURES = {
    "sm_90a": ("__CUDA_ARCH__=900", "__CUDA_ARCH_SPECIFIC__=900"),
    "sm_103a": ("__CUDA_ARCH__=1030", "__CUDA_ARCH_SPECIFIC__=1030"),
}
DYNAMIC_SHARED = re.compile(rb"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


@dataclass(frozen=True)
class Emulation:
    """How kernels run.

    arch: the architecture that sources see, one of ARCHITECTURES.
    seed: 0 takes threads, warps and blocks forward, 1 backward, others at random; asynchronous copies complete as late as the
        program allows for even seeds, and at once for odd ones.
    """

    arch: str = "sm_90a"
    seed: int = 0


class LaunchRecord(ctypes.Structure):
    """``emulator::Launch`` of device/launch.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block_threads", ctypes.c_int),
        ("dynamic_shared", ctypes.c_int),
        ("cluster_blocks", ctypes.c_int),
        ("order", ctypes.c_int),
        ("late", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("shared", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("message", ctypes.c_char * 512),
    )


def launch(record: Launch, inputs: Sequence[int], outputs: Sequence[int], emulation: Emulation) -> None:
    """Run ``record`` at addresses of the host's memory.

    Raises RuntimeError with the block, the thread and the place of the source when the kernel does what it must not.
    """
    run(load(record.kernel, emulation.arch), record, inputs, outputs, emulation)


@cache
def load(kernel: Kernel, arch: str) -> ctypes.CDLL:
    return load_from(kernel, arch, sources(kernel.source))


def load_from(kernel: Kernel, arch: str, texts: dict[str, bytes]) -> ctypes.CDLL:
    """The kernel's library, compiled from ``texts`` or fetched from the user's cache folder."""
    load_runtime()
    macros = [f'SOURCE="{kernel.source}"', f"SYMBOL={kernel.symbol}", *ARCHITECTURES[arch]]
    macros += [f"{name}={value}" for name, value in kernel.defines]
    flags = (*FLAGS, *KERNEL_FLAGS, *optional_flags(), *(f"-D{macro}" for macro in macros))
    library = ctypes.CDLL(str(build(kernel.symbol, ("kernel.cpp",), flags, texts)))
    library.run_kernel.restype = ctypes.c_bool
    return library


@cache
def load_runtime() -> None:
    """What all kernels share, for the libraries that are loaded behind it."""
    ctypes.CDLL(str(build("runtime", RUNTIME, (*FLAGS, "-O2"), {})), mode=ctypes.RTLD_GLOBAL)


def run(
    library: ctypes.CDLL, record: Launch, inputs: Sequence[int], outputs: Sequence[int], emulation: Emulation
) -> None:
    """As ``launch``, of a library that is loaded."""
    values = [
        *(ctypes.c_void_p(address) for address in inputs),
        *(ctypes.c_int(integer) for integer in record.integers),
        *(ctypes.c_void_p(address) for address in outputs),
    ]
    if library.parameters() != len(values):
        raise RuntimeError(
            f"{record.kernel.symbol} takes {library.parameters()} parameters, and is given {len(values)}"
        )
    own = LaunchRecord((ctypes.c_uint32 * 3)(*record.grid), record.kernel.block, record.kernel.dynamic_shared)
    own.order, own.late, own.seed = min(emulation.seed, 2), emulation.seed % 2 == 0, emulation.seed
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    if not library.run_kernel(ctypes.byref(own), pointers):
        raise RuntimeError(f"{record.kernel.symbol}: {own.message.decode()}")


def build(name: str, files: Sequence[str], flags: Sequence[str], texts: dict[str, bytes]) -> Path:
    """A library of some of device/, compiled where the kernels' sources ``texts`` lie beside it."""
    own = {
        path.relative_to(DEVICE).as_posix(): path.read_bytes() for path in sorted(DEVICE.rglob("*")) if path.is_file()
    }
    everything = {**texts, "integers.cuh": (SOURCE_FOLDER / "integers.cuh").read_bytes(), **own}
    digest = hashlib.sha256(repr((compiler_version(), files, flags, sorted(everything.items()))).encode())
    library = cache_folder().parent / "emulated" / f"{name}-{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for path, text in everything.items():
            target = Path(folder, path)
            target.parent.mkdir(exist_ok=True)
            # The one declaration that no macro makes C++ of the host.
            target.write_bytes(
                DYNAMIC_SHARED.sub(rb"\1* const \2 = static_cast<\1*>(emulator::dynamic_shared());", text)
            )
        objects = [f"{file}.o" for file in files]
        for file, target_file in zip(files, objects, strict=True):
            compile_in(folder, *flags, "-I.", "-c", file, "-o", target_file)
        # Without the sanitizers' library: sanitizer.cpp takes its place.
        compile_in(folder, "-shared", *objects, "-o", "library.so")
        os.replace(Path(folder, "library.so"), library)
    return library


def compile_in(folder: str, *arguments: str) -> None:
    done = subprocess.run([compiler(), *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler()} {' '.join(arguments)} failed:\n{done.stderr}")


def can_emulate() -> bool:
    return sys.platform == "linux" and shutil.which(compiler()) is not None


def compiler() -> str:
    return os.environ.get("CXX") or "g++"


@cache
def optional_flags() -> tuple[str, ...]:
    """What is not set holds a pattern: compilers of 2021 do not know this yet."""
    flag = "-ftrivial-auto-var-init=pattern"
    known = subprocess.run([compiler(), flag, "-E", "-x", "c++", os.devnull], capture_output=True).returncode == 0
    return (flag,) if known else ()


@cache
def compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
