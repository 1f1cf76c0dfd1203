"""Finding TensorRT: versions, flavours, what is missing, and what only looks like it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from trtllm_replayssm import compat
from trtllm_replayssm.compat import TYPE_NAMES, TensorRT, load_tensorrt
from trtllm_replayssm.errors import EngineError


def module(version: str, *layers: str, **members: object) -> ModuleType:
    """A module with TensorRT's version and these methods of INetworkDefinition."""
    found = ModuleType("tensorrt")
    network = type("INetworkDefinition", (), dict.fromkeys(layers))
    vars(found).update(
        {"__version__": version, "INetworkDefinition": network, "ICudaEngine": type("ICudaEngine", (), {})}
    )
    vars(found).update(members)
    return found


@pytest.mark.parametrize("version", ["8.6.1", "10.13.3.9", "12.0.0.1"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(
        EngineError, match=f"TensorRT {version} is not supported; this package works with 10.14 to 11.x"
    ):
        TensorRT.of(module(version), "tensorrt")


def test_features_are_looked_for_where_they_are() -> None:
    plain = TensorRT.of(module("10.14.1.48", "add_plugin_v3"), "tensorrt")
    assert plain.version == (10, 14, 1, 48)
    assert vars(plain.features) == {
        "kv_cache_update": False,
        "attention_lengths": False,
        "moe": False,
        "collective": False,
        "plugins": True,
        "aliases": False,
    }
    newer = TensorRT.of(module("10.15.1", "add_kv_cache_update"), "tensorrt")
    assert newer.features.kv_cache_update
    assert not newer.features.plugins


def test_collectives_of_10_16_are_not_used() -> None:
    """The layer is there, but the engines that run it came with 11.0."""
    assert not TensorRT.of(module("10.16.1", "add_dist_collective"), "tensorrt").features.collective
    assert TensorRT.of(module("11.0.0", "add_dist_collective"), "tensorrt").features.collective


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("no_such_module",), "tensorrt_rtx": ("nor_this_one",)})
    with pytest.raises(EngineError, match=r"^tensorrt or tensorrt_rtx is not installed$") as error:
        load_tensorrt()
    assert "'.[tensorrt]'" in error.value.hint


def test_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_trt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("broken_trt",)})
    with pytest.raises(EngineError, match=r"not installed \(broken_trt: libnvinfer\.so\.11: cannot open shared"):
        load_tensorrt(("tensorrt",))


def test_a_folder_of_that_name_is_not_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_trt").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("folder_trt",)})
    with pytest.raises(EngineError, match="tensorrt is not installed"):
        load_tensorrt(("tensorrt",))


def test_first_flavour_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "full_trt", module("11.4.0"))
    monkeypatch.setitem(sys.modules, "rtx_trt", module("1.7.1"))
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("full_trt",), "tensorrt_rtx": ("rtx_trt",)})
    assert load_tensorrt().flavour == "tensorrt"
    assert load_tensorrt(("tensorrt_rtx", "tensorrt")).flavour == "tensorrt_rtx"


def test_dtypes_go_both_ways() -> None:
    names = {name: SimpleNamespace(name=name) for name in TYPE_NAMES.values()}
    tensorrt = TensorRT.of(module("11.4.0", **names), "tensorrt")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool):
        assert tensorrt.torch_dtype(tensorrt.dtype(dtype)) == dtype
