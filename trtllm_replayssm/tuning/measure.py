"""Measures candidates: times of a step in all recurrent layers, errors, and what cannot be had."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Protocol

import torch

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.implementation import Implementation
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.tuning.candidate import Candidate, SlotBytes
from trtllm_replayssm.tuning.drift import Drift, Request, weak_weights
from trtllm_replayssm.tuning.layer import Attributes, Dtypes, cycle, plausible_pools, signature, step_info
from trtllm_replayssm.tuning.subject import LayerGroup, TunedSubject
from trtllm_replayssm.tuning.timing import launches_for

#: Steps of a cycle that are timed, without the one that folds; of a longer cycle as many at even distances.
MOST_POSITIONS = 16


class TimesLaunches(Protocol):
    """timing.Timer, as far as it is used here."""

    def captured(self, launches: Sequence[Callable[[], object]]) -> Callable[[], float]: ...


@dataclass(frozen=True)
class Setting:
    """What is tuned for: steps of ``batch`` requests with ``draft_len`` drafts each. error_tokens: of the request whose
    errors are measured."""

    batch: int
    draft_len: int
    error_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of a request in a step."""
        return self.draft_len + 1


@dataclass(frozen=True)
class Times:
    """Microseconds of a step in all recurrent layers of a rank.

    mean: over a cycle of the ring, its fold included. fold: of the step that folds. mixed: of a batch whose rows are spread
    over the cycle, as those of a running server are.
    """

    mean: float
    fold: float
    mixed: float

    def added(self, other: Times, count: int) -> Times:
        return Times(*(a + count * b for a, b in zip(vars(self).values(), vars(other).values())))


@dataclass(frozen=True)
class Row:
    """A candidate, and what is known of it. refused: why it cannot be had; then nothing else is known.

    drift: the worst of the layers' errors, each by itself.
    """

    candidate: Candidate
    bytes: SlotBytes | None = None
    times: Times | None = None
    drift: Drift | None = None
    refused: str | None = None


def rows(subject: TunedSubject, setting: Setting, candidates: Iterator[Candidate]) -> list[Row]:
    """A row for every candidate: its bytes, or why the model cannot have it. Nothing is measured."""
    groups, found = subject.groups(), []
    for candidate in candidates:
        try:
            replay = candidate.replay(subject.checkpoint.replay, setting.draft_len)
            found.append(Row(candidate, SlotBytes.of(groups, subject.checkpoint, replay)))
        except UserError as reason:
            found.append(Row(candidate, refused=reason.message))
    return found


class Tuner:
    """Measures candidates of one subject on one device, with the kernels of ``plugins``."""

    def __init__(
        self,
        subject: TunedSubject,
        setting: Setting,
        timer: TimesLaunches,
        plugins: Implementation,
        device: torch.device,
    ) -> None:
        self.subject, self.setting, self.timer, self.plugins, self.device = subject, setting, timer, plugins, device
        self.groups = subject.groups()
        self.requests = [self.request(group) for group in self.groups]

    def request(self, group: LayerGroup) -> Request:
        attributes, setting = group.layer.attributes(ReplayConfig()), self.setting
        weights = self.subject.own_weights(group) or weak_weights(attributes)
        activation = self.subject.checkpoint.torch_dtype
        return Request(
            attributes, weights, activation, setting.error_tokens, setting.tokens, setting.batch, self.device
        )

    def settled(self, candidate: Candidate, group: LayerGroup) -> tuple[Attributes, Dtypes]:
        replay = candidate.replay(self.subject.checkpoint.replay, self.setting.draft_len)
        options = StateOptions(replay, self.subject.checkpoint.torch_dtype, max_seq_len=0)
        attributes = group.layer.attributes(replay)
        ring = options.ring_dtype(getattr(attributes, "derived_fold", False))
        return attributes, Dtypes(options.activation, options.state_dtype, ring)

    def compiled(self, rows: Sequence[Row], jobs: int) -> list[Row]:
        """The rows with their kernels compiled and loaded, ``jobs`` at once; refused where there is no kernel."""
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(self.tried, rows))

    def tried(self, row: Row) -> Row:
        """The row after a step in which all batch rows are padding: a first launch compiles, or says that it cannot be."""
        if row.refused is not None:
            return row
        try:
            for group, request in zip(self.groups, self.requests):
                attributes, dtypes = self.settled(row.candidate, group)
                work = Work(attributes, dtypes, self.setting, request, self.plugins, self.device, slots=1)
                work.info[:, Step.SLOT] = -1
                work()
        except UserError as reason:
            return Row(row.candidate, refused=reason.message)
        return row

    def measured(self, row: Row) -> Row:
        """The row with times and errors."""
        times, drifts = Times(0.0, 0.0, 0.0), []
        for group, request in zip(self.groups, self.requests):
            attributes, dtypes = self.settled(row.candidate, group)
            drifts.append(request.drift(attributes, dtypes, self.plugins))
            times = times.added(self.times(attributes, dtypes, request), group.count)
        return Row(row.candidate, row.bytes, times, worst(drifts))

    def times(self, attributes: Attributes, dtypes: Dtypes, request: Request) -> Times:
        """Of one layer."""
        setting = self.setting
        first = Work(attributes, dtypes, setting, request, self.plugins, self.device)
        layers = [first]
        for _ in range(launches_for(first.read_bytes()) - 1):
            layers.append(Work(attributes, dtypes, setting, request, self.plugins, self.device))
            layers[-1].info = first.info
        histories = cycle(attributes.window, setting.tokens)
        place = partial(step_info, attributes.window, tokens=setting.tokens, rows=setting.batch)
        first.info.copy_(place(histories[:1]))
        run = self.timer.captured(layers)

        def timed(found: Sequence[int]) -> float:
            first.info.copy_(place(found))
            return run()

        *between, last = histories
        fold, plain = timed([last]), [timed([history]) for history in spread(between)]
        mean = (statistics.mean(plain) * len(between) + fold) / len(histories) if plain else fold
        return Times(mean, fold, timed(histories))


def worst(drifts: Sequence[Drift]) -> Drift:
    """The largest of each error; NaN is larger than all numbers, whatever stands before or behind it."""
    return Drift(*(max(errors, key=lambda error: (math.isnan(error), error)) for errors in zip(*map(astuple, drifts))))


def spread(histories: Sequence[int]) -> Sequence[int]:
    """Histories at even distances, few enough to be timed one by one; times grow evenly with them."""
    return histories[:: -(-len(histories) // MOST_POSITIONS) or 1]


class Work:
    """A layer with tensors of its own; called, it launches a step."""

    def __init__(
        self,
        attributes: Attributes,
        dtypes: Dtypes,
        setting: Setting,
        request: Request,
        plugins: Implementation,
        device: torch.device,
        slots: int | None = None,
    ) -> None:
        self.attributes, self.weights = attributes, request.weights
        self.run: Any = getattr(plugins, request.kind)
        self.pools = plausible_pools(attributes, dtypes, slots or setting.batch, device)
        leading = (setting.batch, setting.tokens)
        self.inputs = [
            torch.randn(*leading, width, dtype=dtypes.activation, device=device)
            for width in signature(attributes).inputs
        ]
        self.info = step_info(attributes.window, [0], setting.tokens, setting.batch, device)

    def __call__(self) -> object:
        return self.run(self.attributes, *self.inputs, *self.weights, self.info, self.pools)

    def read_bytes(self) -> int:
        """Bytes of state that a step reads at least: of the copy where there is one."""
        names = [name for name in self.pools if name.startswith("read_")] or ["state"]
        return sum(self.pools[name].numel() * self.pools[name].itemsize for name in names)
