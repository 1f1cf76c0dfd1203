"""What every test may rely on."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as COLUMNS says; a parallel test run sets it."""
    monkeypatch.delenv("COLUMNS", raising=False)
