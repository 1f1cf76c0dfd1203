"""Processes of others, which may end while they are looked at."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def with_command(processes: Iterable[psutil.Process], sign: str) -> list[psutil.Process]:
    """Those whose command line has ``sign`` in it; one that has ended has none."""
    return [process for process in processes if sign in command(process)]


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
