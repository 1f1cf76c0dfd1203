"""Reports of benchmarks.accuracy of several models side by side, as one Markdown table.

    python -m benchmarks.accuracy_summary OUTPUT/mamba2.json OUTPUT/gated_delta.json OUTPUT/kda.json

A cell has the bits a byte more than the baseline's, the share of positions with its next token, and the drift in the first and
in the last segment of positions; an asterisk marks what is emulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy_report import EMULATED, Report, Result
from benchmarks.accuracy_variants import BASELINE
from trtllm_replayssm.console import print_error
from trtllm_replayssm.errors import UserError


def summary(reports: Sequence[Report]) -> str:
    """A row for each variant that any model has, in the order of the first that has it."""
    by_model = [{result.name: result for result in report.results} for report in reports]
    names = list(dict.fromkeys(name for results in by_model for name in results))
    rows = [["state", *(report.model for report in reports)], ["---"] * (1 + len(reports))]
    rows += [[name, *(cell(report, found.get(name)) for report, found in zip(reports, by_model))] for name in names]
    lines = [f"{report.model}: {report.conditions()}" for report in reports]
    lines += ["", *("| " + " | ".join(row) + " |" for row in rows)]
    if any(result.emulated for report in reports for result in report.results):
        lines += ["", f"\\* {EMULATED}"]
    return "\n".join(lines) + "\n"


def cell(report: Report, result: Result | None) -> str:
    if result is None:
        return ""
    if result.name == BASELINE:
        return f"{result.bits_per_byte:.5f} bits a byte"
    mark = r" \*" if result.emulated else ""
    return f"{report.more(result)}, {result.agreement:.2%}, {result.drift[0]:.1e} to {result.drift[-1]:.1e}{mark}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy_summary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON file of benchmarks.accuracy")
    options = parser.parse_args()
    try:
        reports = [Report.read(path) for path in options.reports]
    except UserError as error:
        print_error(error.message, error.hint)
        return 1
    print(summary(reports), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
