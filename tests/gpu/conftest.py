"""The tests here run on a GPU. Without one, or with --emulate, kernels run on the emulator (tests/emulator), for the tests that
emulated.py chooses, or for all that it can. README.md says how to run them from a bare checkout."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import emulated
import pytest
import torch
from emulator.launcher import Emulation, can_emulate
from emulator.torch_device import EmulatedGpu


def emulates(config: pytest.Config) -> bool:
    return config.getoption("--emulate") or not torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not emulates(config):
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix() and (reason := why_skipped(item)):
            item.add_marker(pytest.mark.skip(reason=reason))


def why_skipped(item: pytest.Item) -> str:
    """Empty for a test that runs on the emulator."""
    if item.path.stem not in emulated.KERNEL_FILES or emulated.NEEDS_GPU.search(item.name):
        return "needs a CUDA GPU"
    if not can_emulate():
        return "needs a CUDA GPU, or a C++ compiler on Linux to emulate it"
    chosen = item.config.getoption("--emulate") or emulated.is_chosen(item.path.stem, item.name)
    return "" if chosen else "needs a CUDA GPU, or --emulate and time"


@pytest.fixture(scope="module", autouse=True)
def emulated_gpu(request: pytest.FixtureRequest) -> Iterator[EmulatedGpu | None]:
    """Before everything else that a module prepares."""
    if not emulates(request.config):
        yield None
        return
    with EmulatedGpu() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def emulation(emulated_gpu: EmulatedGpu | None, request: pytest.FixtureRequest) -> None:
    """Every test has its own order of threads and copies, always the same."""
    if not emulated_gpu:
        return
    seed, arch = (request.config.getoption(name) for name in ("--emulate-seed", "--emulate-arch"))
    if seed is None:
        seed = zlib.crc32(request.node.name.encode()) % 8
    if arch is None:
        arch = "sm_103a" if request.node.name in emulated.BLACKWELL else "sm_90a"
    emulated_gpu.emulation = Emulation(arch, seed)
