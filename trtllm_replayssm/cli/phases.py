"""A progress bar for works that come in phases, which may be nested, as those of TensorRT's builder."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from trtllm_replayssm.console import LOGGER, color_system

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Called with a phase, the steps done and their number.
Phases = Callable[[str, int, int], None]


@contextmanager
def phase_progress(what: str) -> Iterator[Phases]:
    """Shows how far a work has come; yields the function that is told of its phases. Each has a bar while it lasts.

    Bars on a terminal, one line at the end in any case, neither when the log level is above info.
    """
    if not (LOGGER.handlers and LOGGER.isEnabledFor(logging.INFO)):
        yield lambda phase, done, total: None
        return
    start = time.perf_counter()
    with phase_bars() if sys.stderr.isatty() else nullcontext(lambda phase, done, total: None) as phases:
        yield phases
    LOGGER.info("%s: done in %.1f s", what, time.perf_counter() - start)


@contextmanager
def phase_bars() -> Iterator[Phases]:
    """Bars on the terminal behind stderr, which go away when the work is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, color_system=color_system()), transient=True) as shown:
        yield PhaseBars(shown).told


class PhaseBars:
    """One bar for each phase under way, in the order in which they began."""

    def __init__(self, shown: Progress) -> None:
        self.shown = shown
        self.tasks: dict[str, TaskID] = {}

    def told(self, phase: str, done: int, total: int) -> None:
        if phase not in self.tasks:
            self.tasks[phase] = self.shown.add_task(phase, total=total)
        self.shown.update(self.tasks[phase], completed=done)
        if done == total:
            self.shown.remove_task(self.tasks.pop(phase))
