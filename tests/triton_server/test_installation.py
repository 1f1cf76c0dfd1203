"""What the bundled server's Python would find, asked before it starts."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.triton.installation import check_packages

UNREAD = r"without PYTHONPATH, which Triton's Python does not read$"


def install(folder: Path, *packages: str) -> None:
    """Empty packages, ``name`` or ``name-version``."""
    for package in packages:
        name, _, version = package.partition("-")
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        if version:
            (folder / f"{package}.dist-info").mkdir()
            (folder / f"{package}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("packages", "refusal"),
    [
        ((), UNREAD),
        (("trtllm_replayssm",), UNREAD),
        (("numpy-1.26.4",), UNREAD),
        (("trtllm_replayssm", "numpy-2.3.5"), r"needs numpy 1, and numpy 2\.3\.5 is installed$"),
        (("trtllm_replayssm", "numpy-1.26.4"), None),
    ],
)
def test_packages_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], refusal: str | None
) -> None:
    """Those on PYTHONPATH, which this process would find, do not count."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    paths = {"base": str(place), "platbase": str(place)}
    install(Path(sysconfig.get_path("purelib", "venv", vars=paths)), *packages)
    install(tmp_path / "more", "trtllm_replayssm", "numpy-1.26.4")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    monkeypatch.setattr(sys, "executable", str(place / "bin" / "python"))
    if refusal is None:
        check_packages()
        return
    with pytest.raises(UserError, match=refusal):
        check_packages()
