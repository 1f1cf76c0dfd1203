"""What the world does to a process: signals that end it, streams that the caller has closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """The process was asked to end by ``signum``; raised so that half-written folders are removed on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated(signum)


@contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Terminated in the block, unless the caller has them ignored or handled (as nohup does)."""
    changed = {}
    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is signal.SIG_DFL:
                changed[signum] = signal.signal(signum, terminate)
    try:
        yield
    finally:
        for signum, handler in changed.items():
            signal.signal(signum, handler)


def open_closed_streams() -> None:
    """Gives stdout and stderr somewhere to go where the caller closed them (``>&-``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (open until the process ends)
