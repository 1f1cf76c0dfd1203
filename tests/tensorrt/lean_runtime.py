"""The genuine Python bindings of TensorRT on a machine without libnvinfer.

``tensorrt-cu13-bindings`` needs nine entry points of three libraries. Three stand-ins, compiled here, provide them: registry,
runtime and refitter are those of the lean runtime (``tensorrt-lean-cu13-libs``), the builder and the ONNX parser are null. So
``tensorrt.plugin`` runs with NVIDIA's own validation and a real plugin registry; nothing can be built or run.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

#: Stand-in libraries by their shared-object name: what each defines itself. The rest comes from the lean runtime.
SOURCES = {
    "libnvinfer.so.{major}": """
        void* createInferBuilder_INTERNAL(void* logger, int version) { return 0; }
        void* getBuilderPluginRegistry(int capability) { return getPluginRegistry(); }
    """,
    "libnvinfer_plugin.so.{major}": """
        _Bool initLibNvInferPlugins(void* logger, const char* space) { return 1; }
    """,
    "libnvonnxparser.so.{major}": """
        void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return 0; }
        void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return 0; }
        int getNvOnnxParserVersion(void) { return 0; }
    """,
}
#: Declared for the stand-ins, defined by the lean runtime, which they are linked to.
HEADER = "extern void* getPluginRegistry(void);"


def missing() -> str | None:
    """Why the bindings cannot be loaded here; None when they can."""
    installed = importlib.util.find_spec("tensorrt") if "tensorrt" not in sys.modules else None
    # A folder of that name, like this one, looks like a package without an origin.
    if installed is not None and installed.origin is not None:
        return "a tensorrt package is installed, which the stand-ins must not hide"
    if shutil.which("gcc") is None:
        return "gcc is needed to compile the stand-in libraries"
    for module, package in (
        ("tensorrt_bindings", "tensorrt-cu13-bindings"),
        ("tensorrt_lean_libs", "tensorrt-lean-cu13-libs"),
    ):
        if importlib.util.find_spec(module) is None:
            return f"pip install {package}"
    return None


@cache
def tensorrt_bindings() -> ModuleType:
    """The module ``tensorrt`` with its submodule ``tensorrt.plugin``, as the bindings' package installs them."""
    folder = Path(mkdtemp(prefix="tensorrt-stand-in-"))
    lean = next(Path(find("tensorrt_lean_libs")).glob("libnvinfer_lean.so.*"))
    major = lean.suffix[1:]
    # TensorRT's own package loads its libraries first, too.
    ctypes.CDLL(str(lean), mode=ctypes.RTLD_GLOBAL)
    for name, source in SOURCES.items():
        library = folder / name.format(major=major)
        code = folder / "stand_in.c"
        code.write_text(HEADER + source)
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{library.name}",
            "-o",
            str(library),
            str(code),
            str(lean),
        ]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    package = folder / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n", encoding="utf-8"
    )
    (package / "plugin").symlink_to(Path(find("tensorrt_bindings")) / "plugin")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    importlib.import_module("tensorrt.plugin")
    return sys.modules["tensorrt"]


def find(module: str) -> str:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return spec.submodule_search_locations[0]
