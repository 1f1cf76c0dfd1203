"""Output files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_replayssm.errors import UserError


def check_writable(path: Path) -> None:
    """Raises UserError when a file cannot be written at ``path``; asked before long work, whose result it will hold."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", "give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: {path.parent} is not a folder", "create the folder first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: no permission in {path.parent}")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which becomes ``path`` when the block ends well and is removed otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
