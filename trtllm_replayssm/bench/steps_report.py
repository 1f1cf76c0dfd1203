"""Benchmarks of decode steps as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_replayssm.bench.decode import DecodeTiming
from trtllm_replayssm.bench.profile import StepProfile
from trtllm_replayssm.bench.report import SCHEMA_VERSION, engine_info
from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.runtime.engine import Engine

#: A table: the names of its columns, and its rows.
Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def steps_report(
    engine: Engine,
    machine: dict[str, Any],
    settings: dict[str, Any],
    timings: Sequence[DecodeTiming],
    profiles: Sequence[StepProfile],
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": engine_info(engine),
        "machine": machine,
        "decode_timings": [timing.to_dict() for timing in timings],
        "step_profiles": [profile.to_dict() for profile in profiles],
        "settings": settings,
    }


def timing_rows(timings: Sequence[DecodeTiming]) -> Rows:
    """A row for each mode and size, with its speed against the first mode of that size."""
    base = {timing.batch_size: timing.tokens_per_second for timing in reversed(timings)}
    rows: list[tuple[str, ...]] = [
        (
            str(timing.batch_size),
            timing.mode,
            f"{timing.tokens_per_second:,.1f}",
            f"{timing.tokens_per_second / base[timing.batch_size]:.2f}",
            f"{timing.step_ms.average:.3f}",
            f"{timing.step_ms.p50:.3f}",
            f"{timing.step_ms.p99:.3f}",
            bytes_text(timing.slot_bytes),
        )
        for timing in timings
    ]
    return ("batch", "mode", "tokens/s", "speed-up", "ms a step", "p50", "p99", "state a request"), rows


def profile_rows(profiles: Sequence[StepProfile]) -> Rows:
    """A row for each mode and context length: milliseconds of every part, and the recurrence's share."""
    parts = tuple(profiles[0].milliseconds)
    rows: list[tuple[str, ...]] = [
        (
            str(profile.context_len),
            profile.mode,
            *(f"{profile.milliseconds[part]:.3f}" for part in parts),
            f"{profile.span_ms:.3f}",
            f"{profile.shares['recurrence']:.1%}",
            str(profile.kernels),
        )
        for profile in profiles
    ]
    return ("context", "mode", *parts, "step", "recurrence's share", "kernels"), rows
