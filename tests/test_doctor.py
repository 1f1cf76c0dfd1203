"""doctor: verdicts on machines that have more or less than this one. Absent and broken packages are findings, not errors."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trtllm_replayssm import compat, doctor
from trtllm_replayssm.doctor import diagnose, version_tuple
from trtllm_replayssm.triton import installation


def verdicts() -> dict[str, bool]:
    return {capability.name: capability.available for capability in diagnose().capabilities}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs modules under a name; without attributes, the module is absent."""

    def install(name: str, **attributes: Any) -> None:
        if not attributes:
            monkeypatch.setitem(sys.modules, name, None)
            return
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)

    return install


# Imported while torch is whole: a module that was imported over a fake would stay that way.
assert compat.MODULES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[0] == "nvidia-smi"
        return SimpleNamespace(stdout="NVIDIA H200, 9.0, 580.95.05, 143771 MiB\n" * 2)

    monkeypatch.setattr(subprocess, "run", answer)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(command: list[str], **options: Any) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which versions of distributions are installed; others are not."""

    def install(**named: str) -> None:
        def version(distribution: str) -> str:
            if distribution.replace("-", "_") not in named:
                raise metadata.PackageNotFoundError(distribution)
            return named[distribution.replace("-", "_")]

        monkeypatch.setattr(metadata, "version", version)

    return install


TORCH_CPU = {"__version__": "2.13.0+cpu", "version": SimpleNamespace(cuda=None)}
NO_DEVICES = SimpleNamespace(is_available=lambda: False)


def test_bare_machine(fake: Any, versions: Any, no_gpu: None) -> None:
    for name in ("torch", "tensorrt", "cuda.bindings.nvrtc"):
        fake(name)
    versions()
    diagnosis = diagnose()
    assert not any(capability.available for capability in diagnosis.capabilities)
    found = {finding.name: finding for finding in diagnosis.findings}
    assert found["torch"].value == "torch is not installed"
    assert found["TensorRT"].value == "tensorrt is not installed"
    embedded = diagnosis.capabilities[0]
    assert embedded.missing == ("torch: torch is not installed",)
    assert embedded.mend == ("pip install 'torch>=2.9,<3'",)


def test_cpu_machine(fake: Any, versions: Any, no_gpu: None) -> None:
    fake("torch", **TORCH_CPU, cuda=NO_DEVICES)
    versions(transformers="5.24.0")
    assert verdicts()["embedded engine on the CPU"]
    assert verdicts()["demo and tests"]
    assert not verdicts()["embedded engine on a GPU"]


def test_gpu_hidden_from_a_cpu_build_of_torch(fake: Any, versions: Any, gpu: None) -> None:
    fake("torch", **TORCH_CPU, cuda=NO_DEVICES)
    fake("cuda.bindings.nvrtc", nvrtcVersion=lambda: (0, 13, 0))
    versions()
    capability = next(c for c in diagnose().capabilities if c.name == "embedded engine on a GPU")
    assert capability.missing == ("torch on the GPU: 0 device(s)",)
    assert "pip install" in capability.mend[0]


def test_gpu_machine(fake: Any, versions: Any, gpu: None) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    fake("torch", __version__="2.13.0", version=SimpleNamespace(cuda="13.0"), cuda=cuda)
    fake("cuda.bindings.nvrtc", nvrtcVersion=lambda: (0, 13, 0))
    versions(cuda_bindings="13.0.3", transformers="5.24.0")
    assert verdicts()["embedded engine on a GPU"]
    assert verdicts()["compiling the CUDA kernels"]
    found = {finding.name: finding for finding in diagnose().findings}
    assert found["NVIDIA GPU"].value == "2 x NVIDIA H200, compute capability 9.0, 143771 MiB, driver 580.95.05"
    assert found["NVRTC"].value == "CUDA 13.0, cuda-bindings 13.0.3"


def test_library_that_does_not_load_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    load = doctor.import_module

    def broken(name: str, package: str | None = None) -> ModuleType:
        if name.startswith("trtllm_replayssm"):
            return load(name)
        raise OSError("libnvinfer.so.11: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "import_module", broken)
    monkeypatch.setattr(importlib, "import_module", broken)
    for probe in (doctor.probe_tensorrt, doctor.probe_torch, doctor.probe_torch_cuda, doctor.probe_nvrtc):
        finding = probe()
        assert not finding.present
        assert "libnvinfer.so.11: cannot open" in finding.value


@pytest.mark.parametrize(
    ("version", "usable"), [("10.13.3", False), ("10.14.1", True), ("11.4.0.106", True), ("12.0", False)]
)
def test_tensorrt_versions(version: str, usable: bool, fake: Any) -> None:
    fake("tensorrt", __version__=version, ICudaEngine=object)
    assert doctor.probe_tensorrt().present is usable


@pytest.mark.parametrize(
    ("version", "builder", "usable"),
    [("1.2.1", True, True), ("1.3.0rc5", True, True), ("1.3.0rc29", False, False), ("1.2.1", False, False)],
)
def test_tensorrt_llm_with_and_without_its_builder(
    version: str, builder: bool, usable: bool, tmp_path: Path, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    if builder:
        (tmp_path / "builder.py").touch()
    monkeypatch.setattr(doctor, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    versions(tensorrt_llm=version)
    assert doctor.probe_tensorrt_llm().present is usable


def test_missing_nvidia_smi_is_not_a_missing_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.probe_gpu().value == "nvidia-smi is not installed"

    def failing(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(9, command)

    monkeypatch.setattr(subprocess, "run", failing)
    assert doctor.probe_gpu().value == "nvidia-smi finds no GPU"


def test_triton_is_found_on_path_or_in_a_package(
    tmp_path: Path, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    assert not doctor.probe_triton().present
    monkeypatch.setattr(installation, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    versions(nvidia_pytriton="0.7.0")
    assert doctor.probe_triton().value == "in nvidia-pytriton 0.7.0"
    (tmp_path / "tritonserver").touch(0o755)
    assert doctor.probe_triton().value == str(tmp_path / "tritonserver")


def test_version_tuple() -> None:
    assert version_tuple("1.3.0rc29") == (1, 3)
    assert version_tuple("11.4.0.106") == (11, 4, 0, 106)


def test_diagnosis_of_this_machine_is_json() -> None:
    data = json.loads(json.dumps(diagnose().to_dict()))
    assert {"findings", "capabilities"} == set(data)
    assert data["capabilities"][0]["available"] is True
