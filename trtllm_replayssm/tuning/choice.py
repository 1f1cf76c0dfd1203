"""Which candidate to take: the fastest within limits, and the others that nothing beats in every respect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.tuning.measure import Row

#: Times this much apart, relative to the shorter one, are equal: medians of replays repeat to about half of it.
NOISE = 0.01
#: Without a limit, errors of at most this many times the smallest one count as none.
ERROR_SLACK = 2.0


@dataclass(frozen=True)
class Limits:
    """error: largest relative error of the outputs; slot_bytes: most memory of a request in recurrent layers."""

    error: float
    slot_bytes: int | None = None

    def allow(self, row: Row) -> bool:
        _, size, error = qualities(row)
        return error <= self.error and (self.slot_bytes is None or size <= self.slot_bytes)


def qualities(row: Row) -> tuple[float, int, float]:
    """What a candidate is weighed by, the less the better: microseconds of a mixed batch, bytes, error of the outputs."""
    assert row.times is not None and row.bytes is not None and row.drift is not None
    return row.times.mixed, row.bytes.total, row.drift.last


def is_sound(row: Row) -> bool:
    """Whether the candidate was measured, and its outputs are numbers."""
    return row.drift is not None and math.isfinite(row.drift.last)


def sound(rows: Sequence[Row]) -> list[Row]:
    """Raises UserError when there is no such row."""
    found = [row for row in rows if is_sound(row)]
    if not found:
        reasons = dict.fromkeys(row.refused or "its outputs are no numbers" for row in rows)
        raise UserError(
            f"no candidate can be had: {'; '.join(reasons)}", "give other --windows, --state_dtypes or --read_dtypes"
        )
    return found


def pareto(rows: Sequence[Row]) -> set[int]:
    """Indices of the rows that no other is as good as in every respect and better in one."""
    measured = {i: qualities(row) for i, row in enumerate(rows) if is_sound(row)}
    return {
        i
        for i, mine in measured.items()
        if not any(other != mine and all(a <= b for a, b in zip(other, mine)) for other in measured.values())
    }


def limits(rows: Sequence[Row], max_error: float | None, max_slot_bytes: int | None) -> Limits:
    """The limits given; without one of the error, what the most exact candidate allows."""
    least = min(qualities(row)[2] for row in sound(rows))
    return Limits(ERROR_SLACK * least if max_error is None else max_error, max_slot_bytes)


def chosen(rows: Sequence[Row], within: Limits) -> Row:
    """The fastest row within the limits; of equally fast ones the smallest, of those the most exact.

    Raises UserError when no row is within them.
    """
    allowed = [row for row in sound(rows) if within.allow(row)]
    if not allowed:
        _, sizes, errors = zip(*map(qualities, sound(rows)))
        raise UserError(
            f"no candidate is within the limits: the smallest error is {min(errors):.1e}, the fewest bytes of a request are "
            f"{min(sizes)}, and not of one candidate",
            "raise --max_error or --max_slot_bytes",
        )
    fastest = min(qualities(row)[0] for row in allowed)
    return min(
        (row for row in allowed if qualities(row)[0] <= fastest * (1 + NOISE)), key=lambda row: qualities(row)[1:]
    )


def explained(rows: Sequence[Row], within: Limits, taken: Row, given: bool) -> list[str]:
    """Sentences that say why ``taken`` is chosen. given: whether the limit of the error was."""
    known = sound(rows)
    allowed = [row for row in known if within.allow(row)]
    time, size, error = qualities(taken)
    origin = "" if given else f", {ERROR_SLACK:g} times the smallest"
    bound = "" if within.slot_bytes is None else f" and {bytes_text(within.slot_bytes)} a request"
    lines = [
        f"limits: an error of {within.error:.1e}{origin}{bound}; {len(allowed)} of {len(known)} candidates are within them",
        f"chosen: {taken.candidate}: {time:.1f} us for a step of a mixed batch, {bytes_text(size)} a request, "
        f"error {error:.1e}",
    ]
    equals = [row for row in allowed if row is not taken and qualities(row)[0] <= time * (1 + NOISE)]
    if equals:
        names = "; ".join(str(row.candidate) for row in equals)
        lines.append(f"as fast within {NOISE:.0%}, but larger or less exact: {names}")
    faster = [row for row in known if qualities(row)[0] < time * (1 - NOISE)]
    if faster:
        best = min(faster, key=lambda row: qualities(row)[0])
        shown = f"{qualities(best)[0]:.1f} us, {bytes_text(qualities(best)[1])}, error {qualities(best)[2]:.1e}"
        lines.append(f"fastest without limits: {best.candidate}: {shown}")
    return lines
