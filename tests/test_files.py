"""Output files: regular ones are replaced whole, and whatever else exists is written through and never replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.files import check_writable, output_file


def test_regular_files_appear_whole_or_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with output_file(path) as file:
        file.write(b"first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), output_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["out"]


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    link = tmp_path / "link"
    link.symlink_to("kept/out")
    check_writable(link)
    with output_file(link) as file:
        file.write(b"through")
    assert link.is_symlink()
    assert (tmp_path / "kept/out").read_bytes() == b"through"
    link.unlink()
    link.symlink_to("nowhere/out")
    with pytest.raises(UserError, match="nowhere is not a folder"):
        check_writable(link)


def test_pipes_are_written_through(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    check_writable(fifo)
    with output_file(fifo) as file:
        file.write(b"through")
    reader.join(10)
    assert read == [b"through"]
    assert fifo.is_fifo()


@pytest.mark.parametrize("linked", [False, True])
def test_full_device_is_an_error_and_stays_a_device(tmp_path: Path, linked: bool) -> None:
    device = Path("/dev/full")
    if linked:
        (tmp_path / "link").symlink_to(device)
    path = tmp_path / "link" if linked else device
    check_writable(path)
    with (
        pytest.raises(UserError, match="cannot be written: No space left on device") as caught,
        output_file(path) as file,
    ):
        file.write(b"lost")
    assert "free some space" in caught.value.hint
    assert device.is_char_device()
    assert path.is_symlink() is linked


def test_standard_output_by_name_is_the_open_file(tmp_path: Path) -> None:
    """The shell's file is written, not replaced, so that what follows goes there too."""
    program = (
        "from pathlib import Path\n"
        "from trtllm_replayssm.runtime.files import output_file\n"
        "with output_file(Path('/dev/stdout')) as file: file.write(b'rows')\n"
    )
    path = tmp_path / "shell"
    with path.open("wb") as file:
        node = path.stat().st_ino
        subprocess.run([sys.executable, "-c", program], stdout=file, timeout=60, check=True)
    assert path.read_bytes() == b"rows"
    assert path.stat().st_ino == node
