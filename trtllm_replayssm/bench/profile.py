"""Where the GPU's time of a decode step goes: kernels by what they belong to, and the gaps between them.

Kernels are told apart by their names, so that steps that are replayed from a CUDA graph are seen as they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_replayssm.bench.decode import Mode, prepared_step, synchronise, with_replay
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.session import Session

#: Parts of a step, each with pieces of the names of its kernels; the first part that fits counts.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("recurrence", ("mamba2", "gated_delta", "delta_standard", "kda", "causal_conv", "advance", "materialise")),
    ("attention", ("attention", "cache_update", "rope", "flash", "fmha")),
    ("experts", ("grouped_linear", "expert", "route", "grouped_mm")),
    ("linear", ("row_linear", "gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk")),
    ("communication", ("nccl", "allreduce", "all_reduce", "multimem")),
)
OTHER, GAPS = "other", "gaps"
#: Kernels of a profile that are named one by one.
LISTED = 25


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy on the GPU; times in microseconds of one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class KernelTime:
    """A kernel in one step: milliseconds of all its launches, and how many there are."""

    name: str
    milliseconds: float
    launches: float


@dataclass(frozen=True)
class StepProfile:
    """milliseconds: of one step by part; what lies between kernels is ``gaps``. span_ms: their sum.

    kernels: launches in a step. longest: the kernels that take most of it.
    """

    mode: str
    batch_size: int
    context_len: int
    steps: int
    milliseconds: dict[str, float]
    span_ms: float
    kernels: int
    longest: tuple[KernelTime, ...]

    @property
    def shares(self) -> dict[str, float]:
        return {part: value / self.span_ms for part, value in self.milliseconds.items()}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shares": self.shares}


def part_of(kernel: str) -> str:
    """The part that a kernel belongs to."""
    name = kernel.lower()
    return next((part for part, pieces in PARTS if any(piece in name for piece in pieces)), OTHER)


def account(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Microseconds by part. Where kernels overlap, time counts for the one that began first; the rest are gaps."""
    found = dict.fromkeys((*(part for part, _ in PARTS), OTHER, GAPS), 0.0)
    busy_until: float | None = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if busy_until is None:
            busy_until = kernel.start
        found[GAPS] += max(0.0, kernel.start - busy_until)
        found[part_of(kernel.name)] += max(0.0, kernel.end - max(kernel.start, busy_until))
        busy_until = max(busy_until, kernel.end)
    return found


def longest(kernels: Iterable[Kernel], steps: int) -> tuple[KernelTime, ...]:
    """The LISTED kernels that take most of so many steps, longest first."""
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        times.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    found = [KernelTime(name, sum(spans) / steps / 1e3, len(spans) / steps) for name, spans in times.items()]
    return tuple(sorted(found, key=lambda kernel: -kernel.milliseconds)[:LISTED])


def step_profiles(
    engine: Engine, mode: Mode, batch_size: int, context_lens: Sequence[int], steps: int = 32
) -> Iterator[StepProfile]:
    """Profiles of ``steps`` decode steps at each context length.

    Raises UserError on a CPU, and for lengths that do not fit; EngineError where the device has not enough memory.
    """
    if not context_lens:
        return
    if engine.device.type != "cuda":
        raise UserError("the parts of a step are told apart by their kernels", "profile on a machine with a GPU")
    if min(context_lens) < 1:
        raise UserError(f"context_lens is {min(context_lens)}; it must be 1 or more")
    session = Session(with_replay(engine, mode.replay, batch_size, mode.tokens))
    for context_len in context_lens:
        step = prepared_step(session, mode, context_len, steps)
        kernels = traced(session, step, steps)
        found = {part: value / steps / 1e3 for part, value in account(kernels).items()}
        yield StepProfile(
            *(mode.name, batch_size, context_len, steps, found, sum(found.values())),
            *(len(kernels) // steps, longest(kernels, steps)),
        )


def traced(session: Session, step: Any, steps: int) -> list[Kernel]:
    """What ran on the GPU during so many steps."""
    from torch.profiler import ProfilerActivity, profile

    synchronise(session)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as tracer:
        for _ in range(steps):
            step()
        synchronise(session)
    events = [event for event in tracer.events() or () if event.device_type.name == "CUDA"]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]
