"""The examples run as they are, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_replayssm.demo.models import make_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shell example's work folder, after it ran; its output in ``stdout``."""
    folder = tmp_path_factory.mktemp("example")
    make_checkpoint("qwen3_next", folder / "model")
    command = folder / "bin" / "trtllm-replayssm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trtllm_replayssm "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        [EXAMPLES / "convert_build_generate.sh", folder / "model", folder],
        env=os.environ | {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    return folder


def test_shell_example(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    assert [len(row["output_ids"]) <= 16 for row in rows] == [True, True]
    assert "3 x gated_delta" in (folder / "stdout").read_text()


def test_shell_example_without_arguments_says_what_it_takes() -> None:
    done = subprocess.run([EXAMPLES / "convert_build_generate.sh"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "Usage: convert_build_generate.sh MODEL_DIR WORK_DIR [PROMPT]\n")


def test_python_example(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "speculate.py", folder / "engine"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "the same tokens: True" in done.stdout
