"""What every test may rely on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tests run on tiny models: one thread a process is fastest, and leaves the other cores to other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes of ranks find what tests hand them in tests.NAME. Last: an installed package goes before the checkout's folders.
sys.path.append(str(Path(__file__).parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulated GPU", "tests/gpu without a GPU (tests/gpu/README.md)")
    group.addoption("--emulate", action="store_true", help="run all tests of kernels on the CPU, not a few")
    group.addoption(
        "--emulate-seed", type=int, metavar="N", help="order of all threads and copies: 0 forward, 1 backward, ..."
    )
    group.addoption("--emulate-arch", metavar="ARCH", help="the architecture that sources see: sm_90a or sm_103a")


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says; a parallel test run sets it."""
    monkeypatch.delenv("COLUMNS", raising=False)
