"""Results of the accuracy comparison as JSON, as Markdown, and as a picture of the drift over positions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy_variants import BASELINE, usual
from trtllm_replayssm.bench.plots import save_plot
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.files import output_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA_VERSION = 2
EMULATED = (
    "Emulated: rounded around the engine's own recurrence, because no CUDA kernel keeps such a state of these layers."
)


@dataclass(frozen=True)
class Result:
    """One variant over all texts.

    bits_per_byte: of all positions. by_position: the same of each segment of positions. agreement: share of positions whose
    most probable token is the baseline's. drift: mean absolute difference, in bits, of the true token's information to the
    baseline's, in each segment. rewrites: state rewrites of all texts. seconds: of the variants that ran with it.
    """

    name: str
    emulated: bool
    bits_per_byte: float
    by_position: list[float]
    agreement: float
    drift: list[float]
    rewrites: int
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.name} (emulated)" if self.emulated else self.name


@dataclass
class Report:
    """segments: first position of each, and the number of positions at the end. results: in the order of the run, the
    baseline first. failed: why, by variant. left_out: variants that there was no time for.
    """

    model: str
    about: dict[str, Any]
    segments: list[int]
    results: list[Result] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Report:
        """A report that ``write`` wrote. Raises UserError for anything else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("schema_version") != SCHEMA_VERSION:
                raise ValueError("it is of another version")
            results = [Result(**result) for result in content.pop("results")]
            return cls(**content, results=results)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no report of benchmarks.accuracy: {error}") from None

    def write(self, folder: Path) -> list[Path]:
        """Write NAME.json and NAME.md, each complete or not at all. Raises UserError when that fails."""
        paths = [folder / f"{self.model}{suffix}" for suffix in (".json", ".md")]
        content = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for path, text in zip(paths, (json.dumps(content, indent=1) + "\n", self.markdown())):
            with output_file(path) as file:
                file.write(text.encode())
        return paths

    def markdown(self) -> str:
        lines = [f"## {self.model}", "", self.conditions(), ""]
        ends = [f"from {first}" for first in self.segments[:-1]]
        header = ["state", "bits a byte", "more than standard", "same next token", *(f"drift {end}" for end in ends)]
        rows = [header, ["---"] * len(header)]
        for result in self.results:
            cells = [result.label, f"{result.bits_per_byte:.5f}", self.more(result), f"{result.agreement:.3%}"]
            rows.append([*cells, *(f"{value:.1e}" for value in result.drift)])
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        if any(result.emulated for result in self.results):
            lines += ["", EMULATED]
        if self.left_out:
            lines += ["", f"Not run, for want of time: {'; '.join(self.left_out)}."]
        if self.failed:
            lines += ["", "Failed:", "", *(f"* {name}: {why}" for name, why in self.failed.items())]
        return "\n".join(lines) + "\n"

    def conditions(self) -> str:
        """One sentence: what was fed, and where."""
        about, machine = self.about, self.about["machine"]
        return (
            f"{about['rows']} texts of {about['context_len']} tokens ({about['bytes_per_token']:.2f} bytes each), activations"
            f" in {about['dtype']}, {about['plugins']} implementation on {machine['name']}, {machine['date'][:10]}."
        )

    def measured(self) -> tuple[Any, ...]:
        """What two reports must have in common for their figures to compare."""
        names = ("dtype", "plugins", "rows", "context_len", "bytes_per_token", "text")
        return (self.segments, self.about["machine"]["name"], *(self.about[name] for name in names))

    def more(self, result: Result) -> str:
        """How many more bits a byte than the baseline, as a percentage; empty for the baseline itself."""
        return "" if result.name == BASELINE else f"{result.bits_per_byte / self.results[0].bits_per_byte - 1:+.4%}"

    def plot(self, folder: Path) -> list[Path]:
        """Write NAME.png, the drift over positions, unless no variant drifts. Windows have the summary's table."""
        drifting = [
            result for result in self.results if any(value > 0 for value in result.drift) and usual(result.name)
        ]
        if not drifting:
            return []
        path, middles = folder / f"{self.model}.png", [sum(ends) / 2 for ends in pairwise(self.segments)]

        def draw(axes: Axes) -> None:
            for number, result in enumerate(drifting):
                style = "--" if result.emulated else "-"
                # Ten colours, then the same with another marker.
                axes.plot(
                    middles, result.drift, style, marker="osv^D"[number // 10 % 5], markersize=3, label=result.name
                )
            axes.set_yscale("log")
            # Room for the legend.
            axes.set_xlim(0, 1.7 * self.segments[-1])
            axes.figure.set_size_inches(11, 6)  # type: ignore[union-attr]

        title = f"Drift of {self.model} from a float32 state rewritten at every token"
        save_plot(path, title, "position, tokens", "bits", draw)
        return [path]
