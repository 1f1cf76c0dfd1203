"""Pictures of a run: time over batch as a fraction of the byte floor, and speed against the fastest standard kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Result
from benchmarks.report import OURS, Run
from trtllm_replayssm.errors import UserError, pip_extra


def plot(run: Run, folder: Path) -> list[Path]:
    """Write one PNG for each kind and model. Raises UserError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError("plots need matplotlib", pip_extra("bench")) from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, model in dict.fromkeys((r.kind, r.model) for r in run.results):
        chosen = [r for r in run.results if (r.kind, r.model) == (kind, model) and r.us is not None and r.tokens <= 16]
        tokens, states = (sorted({getattr(r, name) for r in chosen}) for name in ("tokens", "state"))
        if not chosen:
            continue
        size = (5.5 * len(tokens), 4 * len(states))
        figure, grid = pyplot.subplots(len(states), len(tokens), squeeze=False, figsize=size, layout="constrained")
        for row, state in zip(grid, states):
            for axes, count in zip(row, tokens):
                draw(axes, [r for r in chosen if r.state == state and r.tokens == count], run.copy_tb_s)
                axes.set_title(f"{state} state, T = {count}")
        figure.suptitle(f"{kind}, {model}: {run.environment.get('gpu', '')}, copy {run.copy_tb_s:.2f} TB/s")
        paths.append(folder / f"{kind}-{model}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def draw(axes: Any, results: Sequence[Result], bandwidth: float) -> None:
    """Microseconds per row over batch, and the floor of our method."""
    for name in dict.fromkeys(r.subject for r in results):
        points = sorted((r.batch, r.us / r.batch) for r in results if r.subject == name and r.us is not None)
        style = {"linewidth": 2.5, "color": "black"} if name == OURS else {"linewidth": 1.2}
        axes.plot(*zip(*points), marker="o", markersize=3, label=name, **style)
    floors = sorted((r.batch, r.bytes / bandwidth * 1e-6 / r.batch) for r in results if r.subject == OURS and r.bytes)
    if floors:
        axes.plot(*zip(*floors), linestyle="--", color="grey", label="floor of replayssm")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="us a row")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
