"""One tiny engine with every recurrence, and a Triton server on it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from served_engine import write_engine

from trtllm_replayssm.runtime.llm import LLM

if TYPE_CHECKING:
    from serving import Served


@pytest.fixture(scope="session")
def server_package() -> None:
    """Skips where the package with the server cannot be installed; elsewhere, tests fail without it."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.version_info >= (3, 13):
        pytest.skip("nvidia-pytriton, which carries a Triton server, is for Linux on x86-64 with Python 3.10 to 3.12")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def llm(engine: Path) -> LLM:
    """The same engine without a server."""
    return LLM(engine, device="cpu")


@pytest.fixture(scope="session")
def served(server_package: None, engine: Path) -> Iterator[Served]:
    from serving import serving

    with serving(engine) as running:
        yield running
