"""What the world does to a process: signals that end it, streams that the caller has closed."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trtllm_replayssm.console import print_error
from trtllm_replayssm.errors import UserError

#: What ends a process in good order, beside the keyboard.
ENDING = (signal.SIGTERM, signal.SIGHUP)
#: Added to the number of the signal that ended a process, as a shell reports it.
EXIT_SIGNAL = 128
#: Seconds that a rank gets to end by itself after a signal; torchrun kills it after 30.
WAITING_SECONDS = 5.0


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
        for signum in ENDING:
            if signal.getsignal(signum) is signal.SIG_DFL:
                changed[signum] = signal.signal(signum, terminate)
    try:
        yield
    finally:
        for signum, handler in changed.items():
            signal.signal(signum, handler)


@contextmanager
def signals_end_waiting() -> Iterator[None]:
    """SIGTERM and SIGHUP end this rank soon, even while it waits inside a library for another one, which may be gone.

    Python's own handlers run when the library returns: inside NCCL, never. A thread hears of a signal at once, and gives
    the handlers a moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()
    before = signal.set_wakeup_fd(writer)
    threading.Thread(target=end_after_signal, args=(reader, left), daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def end_after_signal(reader: int, left: threading.Event) -> None:
    """Ends the process when ``reader`` tells of a signal and ``left`` is not set soon after; returns at the end of it."""
    with open(reader, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] in ENDING and not left.wait(WAITING_SECONDS):
                name = signal.Signals(number[0]).name
                print_error(f"rank {os.environ['RANK']} was ended by {name} while it waited for another rank")
                os._exit(EXIT_SIGNAL + number[0])


class ClosedOutput(io.TextIOBase):
    """stdout that the caller has closed (``>&-``): a command that has something to print there fails."""

    def write(self, text: str) -> int:
        raise UserError("standard output is closed, and the result is lost", "send it to a file, or to /dev/null")


def prepare_streams() -> None:
    """Lets stdout and stderr take every text, whatever their encoding, and be there where the caller has closed them."""
    # Held open, lest files that are opened later are given the streams' numbers.
    if sys.stdout is None:
        os.open(os.devnull, os.O_WRONLY)
        sys.stdout = ClosedOutput()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        # surrogateescape, which Python takes in the locale C, knows the bytes of file names, and no other characters.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")
