"""Output files: regular files appear complete or not at all, devices and pipes are written through."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trtllm_replayssm.builders.staging import SPACE_HINT, is_full, real
from trtllm_replayssm.errors import UserError

#: Folders whose entries stand for something else: /dev/stdout may be a regular file that the shell holds open.
DEVICE_FOLDERS = ("/dev", "/proc")


def check_writable(path: Path) -> None:
    """Raises UserError when a file cannot be written at ``path``; asked before long work, whose result it will hold."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", "give the name of a file")
    if is_written_through(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{path} cannot be written: no permission")
        return
    folder = real(path).parent
    if not folder.is_dir():
        raise UserError(f"{path} cannot be written: {folder} is not a folder", "create the folder first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: no permission in {folder}")


def check_distinct(paths: Mapping[str, Path]) -> None:
    """Raises UserError when two options name one regular file: one would overwrite the other."""
    named: dict[Path, str] = {}
    for option, path in paths.items():
        if is_written_through(path):
            continue
        first = named.setdefault(real(path), option)
        if first != option:
            raise UserError(f"{first} and {option} are the same file, {path}", f"give another name to {option}")


def is_written_through(path: Path) -> bool:
    """Whether ``path`` is a device, a FIFO, or another name for an open file: none of them may be replaced."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
    return not regular or any(real(path.parent).is_relative_to(folder) for folder in DEVICE_FOLDERS)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """An open file whose content stands at ``path`` when the block ends well.

    A regular file, or the target of a link, is replaced then, and stays as it was when the block fails; anything else that
    exists is written through. Raises UserError that names ``path`` and the reason when it cannot be written.
    """
    try:
        if is_written_through(path):
            with path.open("wb") as file:
                yield file
            return
        target = real(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except BrokenPipeError:
        # A reader that has seen enough is no error.
        raise
    except OSError as error:
        hint = SPACE_HINT if is_full(error) else ""
        raise UserError(f"{path} cannot be written: {error.strerror or error}", hint) from None
