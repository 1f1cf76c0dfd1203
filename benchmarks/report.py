"""Results as JSON and as Markdown tables."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import trtllm_replayssm
from benchmarks.measure import Result
from benchmarks.peers import ABSENT
from benchmarks.peers.fetch import PACKAGES
from trtllm_replayssm.errors import UserError

SCHEMA_VERSION = 1
OURS, STANDARD = "replayssm", "replayssm standard"
#: By read_dtype of the layer.
READS = {"fp8": "replayssm fp8 reads", "nvfp4": "replayssm nvfp4 reads"}


@dataclasses.dataclass
class Run:
    """A whole run: where it ran, the copy bandwidth it was held against (TB/s, read and write), and its results."""

    environment: dict[str, Any]
    copy_tb_s: float
    results: list[Result] = dataclasses.field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=1))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Raises UserError for a file that is no result of this version."""
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no result of a benchmark: {error}") from None
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            raise UserError(f"{path} has another schema_version than {SCHEMA_VERSION}", "run the benchmark again")
        results = [
            Result(**{**r, "by_history": {int(h): t for h, t in r["by_history"].items()}}) for r in content["results"]
        ]
        return cls(content["environment"], content["copy_tb_s"], results)


def environment() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    commit = output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "package": trtllm_replayssm.__version__,
        "commit": commit,
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": output(query).splitlines()[0] if output(query) else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "python": platform.python_version(),
        "peers": {name: package.requirement for name, package in PACKAGES.items()},
    }


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def output(command: list[str]) -> str:
    """What a command prints; empty when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def line(r: Result) -> str:
    """A result while the run goes on."""
    case = f"{r.kind} {r.model} {r.state} T={r.tokens} batch {r.batch} {r.subject}"
    if r.us is None or r.gb_s is None or r.of_floor is None:
        return f"{case}: {r.unavailable or f'relative error {r.error:.1e}'}"
    return f"{case}: {r.us:.1f} us, {r.gb_s:.0f} GB/s, {r.of_floor:.0%} of floor"


def tables(results: Sequence[Result]) -> str:
    """One table for each model, state and number of tokens, and a list of what could not be measured and why."""

    def key(r: Result) -> tuple[str, str, str, int]:
        return r.kind, r.model, r.state, r.tokens

    parts = []
    for (kind, model, state, tokens), group in groupby(sorted(results, key=key), key):
        members = list(group)
        parts.append(f"{kind}, {model}, state {state}, T = {tokens}\n\n{table(members)}")
    return "\n\n".join([*parts, *copy_reads(results), absent(results)])


def table(results: Sequence[Result]) -> str:
    """Rows are batches; peers are shown as time and, in brackets, as a multiple of ours."""
    by_batch = {
        batch: {r.subject: r for r in results if r.batch == batch} for batch in sorted({r.batch for r in results})
    }
    measured = dict.fromkeys(r.subject for r in results if r.us is not None)
    others = [name for name in measured if name != OURS]
    lines = [["batch", "us", "GB/s", "of floor", "fold", "mixed", *others]]
    for batch, row in by_batch.items():
        ours = row.get(OURS)
        cells = [str(batch), *(own_cells(ours) if ours else ["-"] * 5)]
        for name in others:
            us = row[name].us if name in row else None
            ratio = f" ({us / ours.us:.2f})" if us and ours and ours.us else ""
            cells.append(f"{us:.1f}{ratio}" if us else "-")
        lines.append(cells)
    return markdown(lines)


def copy_reads(results: Sequence[Result]) -> Iterator[str]:
    """Steps of one token that read a narrow copy of a float32 state, beside the fastest kernel that rewrites such a state.

    Such a kernel has no ring, and so one time; the multiples are of its time.
    """
    measured = [r for r in results if r.us and r.state == "float32" and r.tokens == 1]
    lines = [["model", "batch", "fastest standard", "us", *(f"{name} reads" for name in ("float32", *READS))]]
    for model, batch in dict.fromkeys((r.model, r.batch) for r in measured if r.subject in READS.values()):
        row = {r.subject: r for r in measured if (r.model, r.batch) == (model, batch)}
        standards = [r for r in row.values() if len(r.by_history) == 1]
        if not standards:
            continue
        fastest = min(standards, key=lambda r: r.us or 0)
        ours = [row[name].us if name in row else None for name in (OURS, *READS.values())]
        cells = [f"{us:.1f} ({(fastest.us or 0) / us:.2f})" if us else "-" for us in ours]
        lines.append([model, str(batch), fastest.subject, f"{fastest.us:.1f}", *cells])
    if len(lines) > 1:
        yield f"T = 1, reads of copies beside the fastest standard kernel\n\n{markdown(lines)}"


def own_cells(r: Result) -> list[str]:
    if r.us is None or r.gb_s is None or r.of_floor is None:
        return ["-"] * 5
    fold = f"{list(r.by_history.values())[-1]:.1f}" if len(r.by_history) > 1 else "-"
    mixed = f"{r.mixed_us:.1f}" if r.mixed_us else "-"
    return [f"{r.us:.1f}", f"{r.gb_s:.0f}", f"{r.of_floor:.0%}", fold, mixed]


def absent(results: Iterable[Result]) -> str:
    failed = dict.fromkeys(
        (f"{r.subject}: {r.kind}, T = {r.tokens}, {r.state}", r.unavailable)
        for r in results
        if r.unavailable is not None
    )
    return markdown([["not measured", "reason"], *map(list, failed), *map(list, ABSENT.items())])


def markdown(lines: Sequence[Sequence[str | None]]) -> str:
    head, *rows = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])
