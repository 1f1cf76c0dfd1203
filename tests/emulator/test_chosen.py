"""The choice of tests that run without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from emulated import CHOSEN

ROOT = Path(__file__).parents[2]


def test_every_chosen_test_exists() -> None:
    """A test that was renamed would be skipped in silence."""
    command = [sys.executable, "-P", "-m", "pytest", "tests/gpu", "--collect-only", "--quiet", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = set(listed.stdout.splitlines())
    chosen = {
        f"tests/gpu/{file}.py::{function}[{parameters}]"
        for file, functions in CHOSEN.items()
        for function, all_parameters in functions.items()
        for parameters in all_parameters
    }
    assert not chosen - found, listed.stderr
