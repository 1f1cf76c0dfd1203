"""Plots of benchmark results as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.errors import UserError, pip_extra
from trtllm_replayssm.runtime.files import output_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trtllm_replayssm.bench.decode import DecodeTiming

#: What a mode is called in a plot, and its marker.
LABELS = {
    "standard": ("standard (window 1)", "o"),
    "replayssm": ("ReplaySSM", "s"),
    "speculative": ("ReplaySSM, speculative", "^"),
}


def check_matplotlib() -> None:
    """Raises UserError unless plots can be drawn; asked before long work, whose result they show."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plots need matplotlib, which is not installed", f"run: {pip_extra('bench')}") from None


def save_plot(path: Path, title: str, x_label: str, y_label: str, draw: Callable[[Axes], None]) -> None:
    """Draw one plot and write it. Raises UserError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would look for a display, and keep every figure.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    with output_file(path) as file:
        canvas.print_png(file)


def plot_throughput(path: Path, timings: Sequence[DecodeTiming], where: str) -> None:
    """Tokens a second by batch size, a line for each mode."""

    def draw(axes: Axes) -> None:
        for name, (label, marker) in LABELS.items():
            points = [(t.batch_size, t.tokens_per_second) for t in timings if t.mode == name]
            if points:
                axes.plot(*zip(*points), marker=marker, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes := sorted({t.batch_size for t in timings}), [str(size) for size in sizes])

    context = timings[0].context_len
    save_plot(path, f"Decode throughput after {context} tokens, {where}", "requests in a step", "tokens/s", draw)


def plot_shares(path: Path, shares: Mapping[int, Mapping[str, float]], title: str) -> None:
    """Shares of a step's time by context length, stacked. shares: by context length and then by part, each adding up to 1."""

    def draw(axes: Axes) -> None:
        lengths = sorted(shares)
        parts = list(dict.fromkeys(part for length in lengths for part in shares[length]))
        heights = [[100 * shares[length].get(part, 0.0) for length in lengths] for part in parts]
        axes.stackplot(lengths, heights, labels=parts, alpha=0.85)
        axes.set_xscale("log")
        axes.set_ylim(0, 100)

    save_plot(path, title, "tokens that each request holds", "share of the step's time, %", draw)
