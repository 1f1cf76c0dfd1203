"""Checks implementations against the float64 reference, then times them over a whole cycle of their cursors."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from benchmarks.cases import Case
from benchmarks.problem import Problem
from benchmarks.subject import Subject, Unavailable, Unsuited
from trtllm_replayssm.tuning.timing import Timer, launches_for

#: Largest relative error of the outputs of a check, by the dtype of the state; activations have 16 bits.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass
class Result:
    """One implementation in one case. Times are microseconds of a layer's step.

    us: mean over a cycle; by_history: each step of it; mixed_us: one step whose rows are spread over the cycle.
    bytes: what the method must move, mean over the cycle; of_floor: their time at the copy bandwidth, over us.
    error: of the outputs against the reference. unavailable: why there is no measurement.
    """

    kind: str
    model: str
    state: str
    batch: int
    tokens: int
    subject: str
    us: float | None = None
    by_history: dict[int, float] = field(default_factory=dict)
    mixed_us: float | None = None
    bytes: float | None = None
    gb_s: float | None = None
    of_floor: float | None = None
    error: float | None = None
    unavailable: str | None = None


def measure(
    case: Case, subjects: Mapping[str, type[Subject]], timer: Timer | None, bandwidth: float
) -> Iterator[Result]:
    """Results of all subjects that the case concerns. bandwidth: TB/s of the same run. Without a timer, checks alone."""
    layers = launches_for(case.step_bytes(case.cycle()[0])) if timer else 0
    problems = [Problem.random(case) for _ in range(layers)]
    for name, kind in subjects.items():
        state = str(case.state).removeprefix("torch.")
        result = Result(case.kind, case.model, state, case.batch, case.tokens, name)
        try:
            result.error = checked(replace(case, batch=kind.checked_rows(case)), kind)
            if timer is not None:
                fill_in(result, kind(problems), timer, bandwidth)
        except Unsuited:
            continue
        except Unavailable as reason:
            result.unavailable = str(reason)
        except Exception as error:  # a peer may fail in any way; the others are still to be measured
            result.unavailable = reason_of(error)
        yield result
        if torch.cuda.memory_reserved() > torch.cuda.get_device_properties(0).total_memory // 2:
            torch.cuda.empty_cache()


def fill_in(result: Result, subject: Subject, timer: Timer, bandwidth: float) -> None:
    cycle = subject.cycle()
    subject.place(cycle[:1])
    run = timer.captured([partial(subject.work, layer) for layer in range(len(subject.problems))])
    for history in cycle:
        subject.place([history])
        result.by_history[history] = run()
    result.us = statistics.mean(result.by_history.values())
    if len(cycle) > 1:
        subject.place(cycle)
        result.mixed_us = run()
    result.bytes = subject.bytes()
    result.gb_s = result.bytes / result.us * 1e-3
    result.of_floor = result.gb_s / (bandwidth * 1e3)


@cache
def checked(case: Case, kind: type[Subject]) -> float:
    """Relative error of the outputs over two cycles, with random acceptance. Raises Unavailable when it is too large."""
    accepted = acceptance(case)
    problem = Problem.random(case, len(accepted), seed=0)
    subject = kind([problem])
    outputs = []
    for i, kept in enumerate(accepted):
        outputs.append(subject.step(0, i).double())
        subject.commit(kept)
    want = expected(kind.held_against(case))
    error = float((torch.stack(outputs) - want).norm() / want.norm())
    if not error <= TOLERANCE[case.state]:
        raise Unavailable(f"its outputs are wrong: relative error {error:.2g}")
    return error


@cache
def expected(case: Case) -> torch.Tensor:
    accepted = acceptance(case)
    return Problem.random(case, len(accepted), seed=0).reference(accepted)


def acceptance(case: Case) -> list[int]:
    """Tokens kept of each step of a check."""
    if case.prefills:
        return [case.tokens]
    draw = random.Random(case.tokens)
    steps = 2 * case.window + 3 if case.tokens == 1 else 4 * case.window // case.tokens
    return [draw.randint(1, case.tokens) for _ in range(steps)]


def reason_of(error: Exception) -> str:
    """One line that says why a peer failed."""
    if type(error).__name__ == "MissingJITCacheError":
        return "not compiled for this case; `python -m benchmarks prebuild` does"
    return f"{type(error).__name__}: {error}".splitlines()[0]
