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


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says; a parallel test run sets it."""
    monkeypatch.delenv("COLUMNS", raising=False)
