"""Output folders that appear complete or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.checkpoint import TOKENIZER_FILES
from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import UserError

SPACE_HINT = "free some space, or choose a folder on another disk"


def check_folders(source_dir: Path, output_dir: Path, replaceable: Callable[[Path], bool]) -> None:
    """Raises UserError when the output would overwrite the source or something that must not be replaced."""
    source, target = real(source_dir), real(output_dir)
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise UserError(f"{output_dir} and {source_dir} lie inside one another", "choose another --output_dir")
    check_output(output_dir, "--output_dir", replaceable)


def own_config(folder: Path, rank_files: str) -> dict[str, Any] | None:
    """config.json of an output folder that holds nothing but files a command writes; None for any other folder.

    rank_files: pattern of the names of its rank files. Replacing such a folder loses nothing of the user's.
    """
    ours = {"config.json", *TOKENIZER_FILES}
    for path in folder.iterdir():
        if path.is_dir() or not (path.name in ours or re.fullmatch(rank_files, path.name)):
            return None
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def check_output(output_dir: Path, option: str, replaceable: Callable[[Path], bool]) -> None:
    """Raises UserError when ``output_dir`` holds something that must not be replaced.

    option: name of the command line option, for the hint. replaceable: whether a non-empty folder is an earlier output.
    """
    with output_errors(output_dir):
        if not os.path.lexists(output_dir):
            nearest = next(folder for folder in real(output_dir).parents if os.path.lexists(folder))
            if not nearest.is_dir():
                raise UserError(
                    f"{output_dir} cannot be written: {nearest} is not a folder", f"choose another {option}"
                )
            return
        if not output_dir.is_dir():
            raise UserError(f"{output_dir} exists and is not a folder", f"choose another {option}")
        if any(output_dir.iterdir()) and not replaceable(output_dir):
            raise UserError(
                f"{output_dir} is not empty and holds something else than an earlier output of this command",
                f"choose another {option}, or empty the folder",
            )


def check_space(output_dir: Path, needed: int) -> None:
    """Raises UserError when the disk of ``output_dir`` has less than ``needed`` bytes left."""
    folder = real(output_dir)
    while not os.path.isdir(folder):
        folder = folder.parent
    with output_errors(output_dir):
        free = shutil.disk_usage(folder).free
    if free < needed:
        left = [str(path) for path in unfinished(output_dir)]
        raise UserError(
            f"{output_dir} needs {bytes_text(needed)}, and its disk has {bytes_text(free)} left",
            SPACE_HINT + (f"; a run that was killed may have left {', '.join(left)}" if left else ""),
        )


def unfinished(output_dir: Path) -> list[Path]:
    """Folders of earlier runs beside ``output_dir``, or in it where it is a mount point, or of runs that still go on."""
    target = real(output_dir)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.\d+\.(tmp|old)")
    beside = target if os.path.ismount(target) else target.parent
    return sorted(path for path in beside.iterdir() if pattern.fullmatch(path.name)) if beside.is_dir() else []


@contextmanager
def staged_folder(output_dir: Path) -> Iterator[Path]:
    """A new empty folder beside ``output_dir``, which takes its place when the block ends well.

    When the block fails or is interrupted, the folder is removed and whatever was at ``output_dir`` stays. OSErrors of the
    block become UserErrors that name the reason.
    """
    # A link to a folder stays a link: its target is replaced.
    target = real(output_dir)
    staging = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    if os.path.ismount(target):
        staging = target / staging.name
    previous = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        with output_errors(output_dir):
            # Only a killed process of the same id can have left one.
            shutil.rmtree(staging, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
            yield staging
            exchange(staging, target, previous)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)


def exchange(staging: Path, target: Path, previous: Path) -> None:
    """Puts ``staging`` in the place of ``target``, which goes to ``previous``, or comes back when that fails."""
    if staging.parent == target:
        fill(staging, target)
        return
    try:
        if target.exists():
            target.rename(previous)
        staging.rename(target)
    except BaseException:
        if previous.exists() and not target.exists():
            previous.rename(target)
        raise


def fill(staging: Path, target: Path) -> None:
    """Moves files into a mount point, which cannot be renamed; without config.json, no reader takes the mix for whole."""
    (target / "config.json").unlink(missing_ok=True)
    for path in target.iterdir():
        if path != staging:
            path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
        path.rename(target / path.name)


def real(path: Path) -> Path:
    """The path without links; unlike Path.resolve it does not raise for links that form a ring."""
    return Path(os.path.realpath(path))


@contextmanager
def output_errors(output_dir: Path) -> Iterator[None]:
    """Turns an OSError of the block into a UserError that names ``output_dir`` and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{output_dir} cannot be written: {error.strerror or error}",
            SPACE_HINT if is_full(error) else "check the folder's permissions, or choose another one",
        ) from None


def is_full(error: OSError) -> bool:
    """Whether the disk, the user's part of it, or the largest file that it can hold, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
