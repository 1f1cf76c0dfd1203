"""Output folders that appear complete or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_replayssm.errors import UserError


def check_output(output_dir: Path, option: str, replaceable: Callable[[Path], bool]) -> None:
    """Raises UserError when ``output_dir`` holds something that must not be replaced.

    option: name of the command line option, for the hint. replaceable: whether a non-empty folder is an earlier output.
    """
    if not output_dir.exists() and not output_dir.is_symlink():
        return
    if not output_dir.is_dir():
        raise UserError(f"{output_dir} exists and is not a folder", f"choose another {option}")
    if any(output_dir.iterdir()) and not replaceable(output_dir):
        raise UserError(
            f"{output_dir} is not empty and was not written by this program",
            f"choose another {option}, or empty the folder",
        )


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """A new empty folder beside ``output_dir``, which takes its place when the block ends well.

    When the block fails or is interrupted, the folder is removed and whatever was at ``output_dir`` stays. OSErrors of the
    block become UserErrors that name the reason.
    """
    # A link to a folder stays a link: its target is replaced.
    target = output_dir.resolve()
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    previous = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        # Only a killed process of the same id can have left one.
        shutil.rmtree(staging, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        try:
            if target.exists():
                target.rename(previous)
            staging.rename(target)
        except BaseException:
            if previous.exists() and not target.exists():
                previous.rename(target)
            raise
    except OSError as error:
        # The path of the staging folder is of no use to the reader: it is gone by then.
        raise UserError(f"{output_dir} cannot be written: {error.strerror or error}", disk_hint(error)) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)


def disk_hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or choose a folder on another disk"
    return "check the folder's permissions, or choose another one"


def check_space(output_dir: Path, needed: int) -> None:
    """Raises UserError when the disk of ``output_dir`` has less than ``needed`` bytes left."""
    folder = output_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{output_dir} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB left",
            "free some space, or choose a folder on another disk",
        )
