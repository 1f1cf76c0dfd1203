"""Reports of benchmarks.accuracy of several models side by side, as Markdown tables.

    python -m benchmarks.accuracy_summary OUTPUT/mamba2.json OUTPUT/gated_delta.json OUTPUT/kda.json

The first table has all variants but other windows than the usual. A cell has the bits a byte more than the baseline's, the
share of positions with its next token, and the drift in the first and in the last segment of positions; an asterisk marks what
is emulated. The second has the windows: bits a byte more, and the drift in the last segment. Reports of one model, of runs that
had a part of the variants each, count as one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy_report import EMULATED, Report, Result
from benchmarks.accuracy_variants import BASELINE, WINDOWED, usual
from trtllm_replayssm.console import print_error
from trtllm_replayssm.errors import UserError


def summary(reports: Sequence[Report]) -> str:
    """The tables, under what was measured where."""
    blocks = [[f"{report.model}: {report.conditions()}" for report in reports], table(variant_rows(reports))]
    if any(result.emulated for report in reports for result in report.results):
        blocks.append([f"\\* {EMULATED}"])
    windows = window_rows(reports)
    if len(windows[0]) > 4:
        blocks.append(table(windows))
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def joined(reports: Sequence[Report]) -> list[Report]:
    """One report for each model. Raises UserError for two whose figures do not compare."""
    models: dict[str, Report] = {}
    for report in reports:
        first = models.setdefault(report.model, report)
        baselines = [one.results[0].bits_per_byte for one in (first, report) if one.results]
        if first.measured() != report.measured() or len(set(baselines)) != 1:
            raise UserError(f"two reports of {report.model} do not compare: {first.conditions()} {report.conditions()}")
        known = {result.name for result in first.results}
        first.results += [result for result in report.results if result.name not in known]
        known |= {result.name for result in report.results}
        first.left_out = [name for name in dict.fromkeys(first.left_out + report.left_out) if name not in known]
        first.failed = {name: why for name, why in (first.failed | report.failed).items() if name not in known}
    return list(models.values())


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body)]


def variant_rows(reports: Sequence[Report]) -> list[list[str]]:
    """A row for each variant that any model has, in the order of the first that has it."""
    by_model = [{result.name: result for result in report.results} for report in reports]
    names = dict.fromkeys(name for results in by_model for name in results if usual(name))
    rows = [["state", *(report.model for report in reports)]]
    return rows + [
        [name, *(cell(report, found.get(name)) for report, found in zip(reports, by_model))] for name in names
    ]


def cell(report: Report, result: Result | None) -> str:
    if result is None:
        return ""
    if result.name == BASELINE:
        return f"{result.bits_per_byte:.5f} bits a byte"
    mark = r" \*" if result.emulated else ""
    return f"{report.more(result)}, {result.agreement:.2%}, {result.drift[0]:.1e} to {result.drift[-1]:.1e}{mark}"


def window_rows(reports: Sequence[Report]) -> list[list[str]]:
    """A row for each model and dtype of its state, a column for each window; 1 is the ordinary engine."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for report in reports:
        for result in report.results:
            if (windowed := WINDOWED.fullmatch(result.name)) and result.name != BASELINE:
                state = found.setdefault((report.model, windowed[1] + (windowed[3] or "")), {})
                state[int(windowed[2] or 1)] = f"{report.more(result)}, {result.drift[-1]:.1e}"
    windows = sorted({window for cells in found.values() for window in cells})
    rows = [["model", "state", *(f"window {window}" for window in windows)]]
    return rows + [[*names, *(cells.get(window, "") for window in windows)] for names, cells in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy_summary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON file of benchmarks.accuracy")
    parser.add_argument("--output", type=Path, help="folder for one report of each model: JSON, Markdown and PNG")
    options = parser.parse_args()
    try:
        reports = joined([Report.read(path) for path in options.reports])
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            for report in reports:
                report.write(options.output)
                report.plot(options.output)
    except UserError as error:
        print_error(error.message, error.hint)
        return 1
    print(summary(reports), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
