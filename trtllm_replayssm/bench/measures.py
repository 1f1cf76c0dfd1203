"""What a benchmark of requests says; names and definitions are those of trtllm-bench where it has them.

TTFT: from a request's arrival to its first token, waiting included. TPOT: the time from the first to the last token over the
tokens behind the first. ITL: the time since the last step that brought a token, divided evenly over the tokens of a step; a
step that accepts drafts brings several. End-to-end latency: from arrival to the last token. Tokens are counted by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import numpy as np

from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics


@dataclass(frozen=True)
class Percentiles:
    """Of a distribution, in the unit of its values."""

    p50: float
    p90: float
    p95: float
    p99: float
    minimum: float
    maximum: float
    average: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """None of no values."""
        data = np.array(list(values), dtype=float)
        if not len(data):
            return None
        p50, p90, p95, p99 = np.percentile(data, (50, 90, 95, 99)).tolist()
        return cls(
            *(p50, p90, p95, p99),
            *(float(data.min()), float(data.max()), float(data.mean()), float(data.std())),
            len(data),
        )

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class Record:
    """One request's course; times in seconds of one clock.

    arrival: when it was due, which may be before the scheduler knew of it. times, counts: of the steps that brought tokens,
    and how many each brought.
    """

    request_id: int
    input_tokens: int
    arrival: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    speculation: SpeculationStatistics = field(default_factory=SpeculationStatistics)
    cached_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.times[-1] - self.arrival

    @property
    def generation_time(self) -> float:
        """From the first token to the last."""
        return self.times[-1] - self.times[0]

    @property
    def tpot(self) -> float | None:
        """None of one token. Where the first step brought several tokens, they came at once with the first."""
        return self.generation_time / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        gaps = zip(self.times, self.times[1:], self.counts[1:])
        return [(later - earlier) / count for earlier, later, count in gaps for _ in range(count)]


def milliseconds(values: Iterable[float]) -> Percentiles | None:
    return Percentiles.of(value * 1e3 for value in values)
