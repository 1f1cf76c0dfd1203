"""The wheel: everything in it, usable from any folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Folders of the checkout and the package names that they become.
SOURCES = {
    "trtllm_replayssm": "trtllm_replayssm",
    "plugins": "trtllm_replayssm/plugins",
    "builders": "trtllm_replayssm/builders",
}


def expected_files() -> set[str]:
    """Every file of the checkout that belongs into the wheel, by its name there."""
    files = set()
    for folder, package in SOURCES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".typed") and "__pycache__" not in path.parts:
                files.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", ROOT / name, copy], check=True)
    # Trained models and other data of tests stay behind.
    (copy / "tests").symlink_to(ROOT / "tests")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("*.whl"))


def test_wheel_holds_every_module_kernel_and_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert names == expected_files()
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("cuda", "tensorrt", "trtllm", "triton", "bench", "demo", "test"):
        assert f"Provides-Extra: {extra}" in metadata


def test_installed_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(command, check=True, timeout=300)
    program = (
        "import trtllm_replayssm as p, trtllm_replayssm.builders.model as b, trtllm_replayssm.plugins.cursors as c\n"
        f"assert all(m.__file__.startswith({str(target)!r}) for m in (p, b, c)), p.__file__\n"
        "from trtllm_replayssm.cli.main import main\n"
        "raise SystemExit(main(['doctor', '--json']))\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=elsewhere,
        env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert '"capabilities"' in done.stdout
