"""Imports the peers' modules from the folder that ``fetch`` filled, without the frameworks around them.

A peer's packages are stand-ins that know their folder but run no ``__init__``; of the framework modules that the kernels
import, the few names they use are provided here.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks.problem import INTERPRETED
from benchmarks.subject import Unavailable

_folder = Path(".peers").resolve()


def use_folder(folder: Path) -> None:
    """Where the peers lie."""
    global _folder
    _folder = folder.resolve()


def tune_quickly() -> None:
    """Make Triton's tuners, which some peers run at first use, compare their variants in short measurements."""
    import triton.testing

    triton.testing.do_bench = partial(triton.testing.do_bench, warmup=3, rep=15)


def package(name: str, **names: Any) -> ModuleType:
    """A stand-in for the package or module ``name``, with these names in it; its submodules come from the folder."""
    if name not in sys.modules:
        module = ModuleType(name)
        module.__path__ = [str(_folder / name.replace(".", "/"))]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(package(parent), last, module)
    vars(sys.modules[name]).update(names)
    return sys.modules[name]


def load(name: str) -> Any:
    """The module ``name``. Raises Unavailable when it, or something it needs, is not there."""
    if not _folder.is_dir():
        raise Unavailable(f"there is no folder {_folder.name}; `python -m benchmarks fetch` makes it")
    parts = name.split(".")
    for i in range(1, len(parts)):
        package(".".join(parts[:i]))
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error


@cache
def capability() -> tuple[int, int]:
    """Of the GPU; of an H200 where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


@cache
def exponentials() -> dict[str, Any]:
    """Triton's ``exp`` and ``log`` under the names by which kernels of the fla family import them."""
    import triton
    import triton.language as tl

    if not INTERPRETED:
        return {"exp": tl.exp, "log": tl.log}

    @triton.jit
    def exp(x):
        return tl.exp(x)

    @triton.jit
    def log(x):
        return tl.log(x)

    return {"exp": exp, "log": log}


def mamba_ssm(name: str) -> Any:
    return load(f"mamba_ssm.ops.triton.{name}")


def sglang(name: str) -> Any:
    """A module below ``sglang.kernels.ops``."""
    major, minor = capability()
    package("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: not INTERPRETED)
    package(
        "sglang.srt.utils",
        get_device_sm=lambda: 10 * major + minor,
        is_cuda=lambda: not INTERPRETED,
        is_hip=lambda: False,
        is_gfx95_supported=lambda: False,
        is_sm90_supported=lambda: major == 9,
    )
    fla = "sglang.kernels.ops.attention.fla"
    package(f"{fla}.utils", is_tf32_supported=True, is_gather_supported=True, input_guard=lambda function: function)
    package(f"{fla}.op", **exponentials())
    # KDA decode of SGLang has a CUDA route that its own build system compiles; the Triton route is taken.
    package("sglang.kernels.ops.attention.kda_packed_decode", covered=lambda *_, **__: False)
    return load(f"sglang.kernels.ops.{name}")


def vllm(name: str) -> Any:
    """A module below ``vllm``."""
    import triton
    import triton.language as tl

    major, minor = capability()
    platform = SimpleNamespace(
        is_cuda=lambda: not INTERPRETED,
        is_cuda_alike=lambda: not INTERPRETED,
        is_rocm=lambda: False,
        is_cpu=lambda: False,
        is_xpu=lambda: False,
        is_device_capability_family=lambda wanted, device_id=0: wanted // 10 == major,
        is_device_capability=lambda wanted, device_id=0: wanted == 10 * major + minor,
        get_device_capability=lambda *_: (major, minor),
    )
    log: Any = logging.getLogger("peers")
    for level in ("warning_once", "info_once", "debug_once"):
        setattr(log, level, lambda *_, **__: None)
    package("vllm", _custom_ops=package("vllm._custom_ops"), envs=package("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None))
    package("vllm.logger", init_logger=lambda _: log)
    package("vllm.platforms", current_platform=platform)
    package("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True, tldevice=None)
    device_name = "cpu" if INTERPRETED else torch.cuda.get_device_name().replace(" ", "_")
    package("vllm.utils.platform_utils", get_device_name_as_file_name=lambda: device_name)
    package("vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0)
    package("vllm.third_party.flash_linear_attention.ops.op", **exponentials())
    return load(f"vllm.{name}")


def cute_dsl() -> Iterator[Path]:
    """Where the CuTe DSL's modules lie if it is there for the running Python; for another one FlashInfer trips over it."""
    path = _folder / "nvidia_cutlass_dsl" / "dsl_packages"
    if any(path.glob(f"cutlass/_mlir/_mlir_libs/*{EXTENSION_SUFFIXES[0]}")):
        yield path


def whole(name: str) -> Any:
    """A module of a package that is imported as it is (fla, flashinfer, cutlass, which flashinfer imports if it can)."""
    if not _folder.is_dir():
        raise Unavailable(f"there is no folder {_folder.name}; `python -m benchmarks fetch` makes it")
    for path in map(str, (_folder, *cute_dsl())):
        if path not in sys.path:
            sys.path.append(path)
    major, minor = capability()
    # FlashInfer looks for libraries of this architecture; compiling one in the middle of a run would take minutes.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}a")
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")
    # Its libraries call the driver without naming it.
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    # Its kernels in the CuTe DSL take seconds; without a cache on disk they are exempt from that.
    os.environ.setdefault("FLASHINFER_CUTE_DSL_DISABLE_CACHE", "1")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Unavailable(f"{name} cannot be imported: {error}") from error
