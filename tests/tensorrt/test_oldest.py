"""TensorRT 10.14, the oldest that is supported: its bindings take the plugin layers, and have all that is asked of them.

Two versions of the bindings do not go into one process, and only one can be installed. The other lies in a folder of its own,
which ``make test`` fills (oldest.txt): bindings of 10.14 over the lean runtime of 10.15, the first with a wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: TENSORRT_10_14 names another place.
FOLDER = Path(os.environ.get("TENSORRT_10_14") or Path(sys.prefix) / "tensorrt-10.14")
FILES = ("test_plugins.py", "test_asked.py", "test_oldest.py::test_version")


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"make test puts its bindings into {FOLDER}")
def test_the_other_tests_pass_with_its_bindings() -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1", "TENSORRT_IS_10_14": "1"}
    # Workers of an outer parallel run must not be taken for ours.
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in FILES)],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 80, done.stdout[-2000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.skipif("TENSORRT_IS_10_14" not in os.environ, reason="of the run above")
def test_version() -> None:
    from lean_runtime import tensorrt_bindings

    from trtllm_replayssm.compat import TensorRT

    tensorrt = TensorRT.of(tensorrt_bindings(), "tensorrt")
    assert tensorrt.version[:2] == (10, 14)
    assert [name for name, there in vars(tensorrt.features).items() if there] == ["plugins"]
