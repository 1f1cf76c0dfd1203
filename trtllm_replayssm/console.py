"""What commands say while they work: log lines and progress bars on stderr, results on stdout."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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


#: Reports that so many more units are done.
Advance = Callable[[float], None]


@contextmanager
def progress(what: str, total: float, unit: str = "") -> Iterator[Advance]:
    """Shows how far ``what`` has come; yields a function that is called with the units done since the last call.

    A bar on a terminal; elsewhere one line at the end. Neither below log level info.
    unit: ``bytes`` prints sizes as such, anything else is only a label.
    """
    if not LOGGER.isEnabledFor(logging.INFO) or not LOGGER.handlers:
        yield lambda units: None
    elif sys.stderr.isatty():
        with bar(what, total, unit) as advance:
            yield advance
    else:
        start = time.perf_counter()
        yield lambda units: None
        LOGGER.info("%s: %.1f s", what, time.perf_counter() - start)


@contextmanager
def bar(what: str, total: float, unit: str) -> Iterator[Advance]:
    """A bar on the terminal behind stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    done = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TextColumn("" if unit == "bytes" else unit))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=total)
        yield lambda units: shown.advance(task, units)


# ---- results on stdout -----------------------------------------------------------------------------------------------


def print_line(text: str = "") -> None:
    """One line of a result."""
    sys.stdout.write(text + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A result as a table; columns that hold figures are aligned to the right. As wide as it needs when piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [tuple(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        figures = all(re.fullmatch(r"-?[\d.]+ ?\S*", row[i]) for row in rows)
        table.add_column(column, justify="right" if figures else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 240, markup=False, highlight=False)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)


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
