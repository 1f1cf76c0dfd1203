"""The stand-in for tensorrt-llm is there for the tests of one file, and gone after them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

HERE = Path(__file__).parent
#: Modules that exist, or mean something, only beside the stand-in.
TEMPORARY = ("tensorrt_llm", "trtllm_replayssm.trtllm", "cut_models")


@pytest.fixture(scope="module")
def llm() -> Iterator[SimpleNamespace]:
    """Modules of the stand-in, and the model classes."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")
    folders = [str(HERE / "stand_in"), str(HERE)]
    sys.path[:0] = folders
    forget()
    names = ("builder", "models", "models.modeling_utils", "graph_rewriting", "functional", "plugin", "trt", "bindings")
    modules: dict[str, ModuleType] = {
        name.rpartition(".")[2]: importlib.import_module(f"tensorrt_llm.{name}") for name in names
    }
    yield SimpleNamespace(**modules, cut=importlib.import_module("cut_models"))
    forget()
    for folder in folders:
        sys.path.remove(folder)


def forget() -> None:
    for name in list(sys.modules):
        if any(name == module or name.startswith(f"{module}.") for module in TEMPORARY):
            del sys.modules[name]
    importlib.invalidate_caches()
