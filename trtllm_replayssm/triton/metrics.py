"""What Prometheus learns of the engine: counted here as requests and steps go by, shown by Triton's metrics endpoint.

Counting is cheap; every change of a value that Triton shows is a message to the server, so they are passed on now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.triton.replies import Times

#: Upper bounds of histograms, in seconds.
LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SECOND = 1e9


@dataclass(frozen=True)
class Family:
    """One metric: its kind, what it says, and the values of its label ``status`` where it has one."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    statuses: tuple[str, ...] = ()


#: How a request can end. rejected: it could not be run as it was.
STATUSES = ("stop", "length", "cancelled", "rejected", "error")

FAMILIES = {
    "replayssm_requests_total": Family("counter", "Requests that have ended, by how", STATUSES),
    "replayssm_prompt_tokens_total": Family("counter", "Prompt tokens of requests that were taken"),
    "replayssm_generated_tokens_total": Family("counter", "Tokens that were generated"),
    "replayssm_steps_total": Family("counter", "Steps of the scheduler"),
    "replayssm_state_rewrites_total": Family(
        "counter", "Times that a slot's recurrent state was rewritten (flushes and prefill)"
    ),
    "replayssm_decode_steps_total": Family("counter", "Decode steps, counted per request"),
    "replayssm_draft_tokens_total": Family("counter", "Draft tokens that were verified"),
    "replayssm_accepted_draft_tokens_total": Family("counter", "Draft tokens that were accepted"),
    "replayssm_prefix_cache_tokens_total": Family("counter", "Prompt tokens that the prefix cache was asked for"),
    "replayssm_prefix_cache_hit_tokens_total": Family("counter", "Prompt tokens that came from the prefix cache"),
    "replayssm_slots": Family("gauge", "Slots of the engine (max_batch_size)"),
    "replayssm_slots_in_use": Family("gauge", "Slots that hold a running request"),
    "replayssm_requests_waiting": Family("gauge", "Requests that wait for a slot"),
    "replayssm_draft_acceptance_rate": Family("gauge", "Share of all draft tokens that were accepted"),
    "replayssm_acceptance_length": Family(
        "gauge", "Tokens of a request in one decode step, on average; 1 without drafts"
    ),
    "replayssm_queue_seconds": Family("histogram", "From arrival to the first step of a request"),
    "replayssm_time_to_first_token_seconds": Family("histogram", "From arrival to the first token of a request"),
    "replayssm_time_per_output_token_seconds": Family(
        "histogram", "From the first to the last token, per token after the first"
    ),
    "replayssm_request_seconds": Family("histogram", "From arrival to the end of a request"),
}


class Meter(Protocol):
    """One value of Triton's metrics endpoint."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class Metrics:
    """Values since the start. ``after_step`` is called by the stepping thread, the rest by the one that exports."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.steps = self.generated_tokens = self.in_use = self.waiting = 0
        self.ended: dict[str, int] = dict.fromkeys(STATUSES, 0)
        self.prompt_tokens = 0
        self.observed: list[tuple[str, float]] = []
        self.exported: dict[tuple[str, str], float] = {}
        #: Of requests that have not ended.
        self.times: dict[RequestId, Times] = {}

    def arrived(self, request_id: RequestId) -> Times:
        """A request is about to be submitted."""
        times = self.times[request_id] = Times()
        return times

    def after_step(self, updates: Sequence[Update], began: int) -> None:
        """began: when the step began, in ns since the epoch."""
        for update in updates:
            if (times := self.times.get(update.request_id)) is not None:
                times.step(began, len(update.token_ids))
        for job in self.scheduler.running.values():
            if (times := self.times.get(job.request.request_id)) is not None and not times.scheduled:
                times.step(began, 0)
        self.steps += 1
        self.generated_tokens += sum(len(update.token_ids) for update in updates)
        self.in_use, self.waiting = len(self.scheduler.running), len(self.scheduler.waiting)

    def rejected(self) -> None:
        """A request could not be run."""
        self.ended["rejected"] += 1

    def finished(self, request: Request, update: Update) -> None:
        """A request has ended."""
        times = self.times.pop(request.request_id)
        self.prompt_tokens += len(request.prompt)
        self.ended["error" if update.output is None else update.output.finish_reason] += 1
        if times.scheduled:
            self.observe("replayssm_queue_seconds", times.arrival, times.scheduled)
        if times.first_token:
            self.observe("replayssm_time_to_first_token_seconds", times.arrival, times.first_token)
            self.observe("replayssm_request_seconds", times.arrival, times.last_token)
        if (gaps := len(request.tokens) - 1) > 0:
            self.observe("replayssm_time_per_output_token_seconds", times.first_token, times.last_token, gaps)

    def observe(self, name: str, start: int, end: int, parts: int = 1) -> None:
        self.observed.append((name, max(0, end - start) / SECOND / parts))

    def values(self) -> dict[tuple[str, str], float]:
        """What counters and gauges say now, by name and status."""
        counts, cache = self.scheduler.statistics, self.scheduler.prefix_cache
        plain = {
            "replayssm_prompt_tokens_total": self.prompt_tokens,
            "replayssm_generated_tokens_total": self.generated_tokens,
            "replayssm_steps_total": self.steps,
            "replayssm_state_rewrites_total": self.scheduler.session.rewrites,
            "replayssm_decode_steps_total": counts.num_steps,
            "replayssm_draft_tokens_total": counts.num_draft_tokens,
            "replayssm_accepted_draft_tokens_total": counts.num_accepted_draft_tokens,
            "replayssm_prefix_cache_tokens_total": 0 if cache is None else cache.statistics.queries,
            "replayssm_prefix_cache_hit_tokens_total": 0 if cache is None else cache.statistics.hits,
            "replayssm_slots": self.scheduler.session.max_batch_size,
            "replayssm_slots_in_use": self.in_use,
            "replayssm_requests_waiting": self.waiting,
            "replayssm_draft_acceptance_rate": counts.draft_acceptance_rate,
            "replayssm_acceptance_length": counts.acceptance_length,
        }
        by_status = {("replayssm_requests_total", status): count for status, count in self.ended.items()}
        return {(name, ""): value for name, value in plain.items()} | by_status

    def export(self, meters: Mapping[tuple[str, str], Meter]) -> None:
        """Pass on what has changed since the last time."""
        for key, value in self.values().items():
            before = self.exported.get(key, 0.0)
            if value != before:
                if FAMILIES[key[0]].kind == "gauge":
                    meters[key].set(value)
                else:
                    meters[key].increment(value - before)
                self.exported[key] = value
        observed, self.observed = self.observed, []
        for name, value in observed:
            meters[name, ""].observe(value)


class TritonMeters(dict[tuple[str, str], Meter]):
    """Triton's own values for all families, by name and status."""

    def __init__(self, backend: Any, labels: Mapping[str, str]) -> None:
        """backend: the module triton_python_backend_utils."""
        kinds = {kind: getattr(backend.MetricFamily, kind.upper()) for kind in ("counter", "gauge", "histogram")}
        #: Kept, because values go with their family.
        self.families = {
            name: backend.MetricFamily(name=name, description=family.text, kind=kinds[family.kind])
            for name, family in FAMILIES.items()
        }
        for name, family in FAMILIES.items():
            buckets = {"buckets": list(LATENCIES)} if family.kind == "histogram" else {}
            for status in family.statuses or ("",):
                own = {"status": status} if status else {}
                self[name, status] = self.families[name].Metric(labels={**labels, **own}, **buckets)
