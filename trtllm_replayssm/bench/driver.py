"""Runs the requests of a benchmark through a scheduler and notes when their tokens came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from trtllm_replayssm.bench.measures import Record
from trtllm_replayssm.bench.workload import Item
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.agreement import agreed
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler

#: Longest sleep, in seconds, while no request is due.
NAP = 0.001


def arrivals(count: int, request_rate: float | None, seed: int = 0) -> list[float]:
    """Seconds at which requests are due: a Poisson process of ``request_rate`` a second, or all at once.

    Raises UserError unless the rate is positive.
    """
    if request_rate is None:
        return [0.0] * count
    if not 0 < request_rate < float("inf"):
        raise UserError(f"request_rate is {request_rate}; it must be a positive number of requests a second")
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def run_requests(
    scheduler: Scheduler,
    items: Sequence[Item],
    request_rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
) -> list[Record]:
    """Run all requests to their end, greedily; every rank of an engine calls this with the same arguments.

    request_rate: requests a second that arrive, whatever the engine does. concurrency: most requests that are under way; the
    next one arrives when one has ended.

    Raises UserError, before anything runs, for a request that cannot be run to its full length.
    """
    if concurrency is not None and concurrency < 1:
        raise UserError(f"concurrency is {concurrency}; it must be 1 or more")
    engine, due = scheduler.session.engine, deque(enumerate(arrivals(len(items), request_rate, seed)))
    requests = [
        Request(i, item.prompt, SamplingParams(max_tokens=item.output_tokens, end_id=-1), frozenset(), None)
        for i, item in enumerate(items)
    ]
    for request in requests:
        check_request(engine, request)
        if request.limit < request.params.max_tokens:
            raise UserError(
                f"prompt {request.request_id} has {len(request.prompt)} tokens; with {request.params.max_tokens} more it is"
                f" longer than max_seq_len {engine.config.max_seq_len}",
                "ask for less, or build the engine with a larger --max_seq_len",
            )
    records: dict[int, Record] = {}
    finished, start = 0, time.perf_counter()
    while finished < len(items):
        now = time.perf_counter() - start
        room = len(items) if concurrency is None else concurrency - (len(records) - finished)
        ready = sum(1 for _, arrival in due if arrival <= now)
        # Clocks of ranks differ; that of rank 0 counts.
        [[count]] = agreed([[min(room, ready)]], 1, engine)
        for _ in range(count):
            index, arrival = due.popleft()
            arrived = now if concurrency is not None else arrival
            records[index] = Record(index, len(items[index].prompt), start + arrived)
            scheduler.submit(requests[index])
        if not scheduler.busy:
            time.sleep(min(NAP, max(0.0, due[0][1] - now)))
            continue
        updates = scheduler.step()
        now_absolute = time.perf_counter()
        for update in updates:
            if update.error is not None:
                raise update.error
            record = records[int(update.request_id)]
            if update.token_ids:
                record.times.append(now_absolute)
                record.counts.append(len(update.token_ids))
            if update.finished:
                finished += 1
                request = requests[record.request_id]
                record.speculation, record.cached_tokens = request.statistics, request.cached_tokens
    return [records[i] for i in range(len(items))]
