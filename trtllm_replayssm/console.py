"""What commands say while they work: log lines and progress bars on stderr, results on stdout."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

#: Logger of the whole package; library users attach their own handlers to it.
LOGGER = logging.getLogger("trtllm_replayssm")
#: Values of --log_level. ``verbose`` is TensorRT-LLM's name for debug.
LOG_LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
}


def start_logging(level: str) -> None:
    """Sends the package's log records at ``level`` (a key of LOG_LEVELS) and above to stderr, one plain line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(LOG_LEVELS[level])
    LOGGER.propagate = False


class LineFormatter(logging.Formatter):
    """``message`` at info, ``warning: message`` at other levels; the module's name only when debugging."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno == logging.INFO:
            return text
        where = f"{record.name}: " if record.levelno == logging.DEBUG else ""
        return f"{record.levelname.lower()}: {where}{text}"


def print_error(message: str, hint: str = "") -> None:
    """The one line, and the hint, that a failed command ends with."""
    lines = [f"error: {message}"] + ([f"hint: {hint}"] if hint else [])
    print("\n".join(lines), file=sys.stderr, flush=True)


#: Characters of a table's line when nothing says how wide the reader is.
PIPED_WIDTH = 240

#: Called with the bytes done so far, the bytes to do, and what is at hand.
ByteProgress = Callable[[int, int, str], None]


@contextmanager
def byte_progress(what: str) -> Iterator[ByteProgress]:
    """Shows how far a long work over files has come; yields the function that is told.

    A bar on a terminal, one line at the end elsewhere, neither when the log level is above info.
    """
    if not (LOGGER.handlers and LOGGER.isEnabledFor(logging.INFO)):
        yield lambda done, total, name: None
        return
    start = time.perf_counter()
    with byte_bar(what) if sys.stderr.isatty() else nullcontext(lambda done, total, name: None) as report:
        yield report
    LOGGER.info("%s: done in %.1f s", what, time.perf_counter() - start)


@contextmanager
def byte_bar(what: str) -> Iterator[ByteProgress]:
    """A bar on the terminal behind stderr, which goes away when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
    )
    console = Console(stderr=True, color_system=color_system())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=None, name="")
        yield lambda done, total, name: shown.update(task, completed=done, total=total, name=name)


# ---- results on stdout -----------------------------------------------------------------------------------------------


def print_line(text: str = "") -> None:
    """One line of a result."""
    sys.stdout.write(text + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A result as a table; columns that hold figures are aligned to the right.

    As wide as the terminal, or as COLUMNS says; as it needs when piped. Raises BrokenPipeError when the reader has gone.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [tuple(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns))
    for i, column in enumerate(columns):
        figures = all(re.fullmatch(r"-?[\d.]+ ?\S*", row[i]) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    console = Console(width=width, color_system=color_system(), markup=False, highlight=False)
    # By itself rich would end the process with status 1.
    console.on_broken_pipe = broken_pipe  # type: ignore[method-assign]
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


def color_system() -> Literal["auto"] | None:
    """Of rich; None writes no escape codes for colours or styles, which NO_COLOR (https://no-color.org) asks for."""
    return None if os.environ.get("NO_COLOR") else "auto"


def broken_pipe() -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def bytes_text(size: float) -> str:
    """Bytes with a binary unit and three digits: ``135 MiB``."""
    return scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def count_text(count: float) -> str:
    """A count with a decimal unit: ``31.6 B``."""
    return scaled(count, 1000, ("", "K", "M", "B", "T")).rstrip()


def scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    unit = 0
    while value >= step and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    digits = 0 if unit == 0 and value == int(value) else max(0, 2 - len(str(int(value))) + 1)
    return f"{value:.{digits}f} {units[unit]}"
