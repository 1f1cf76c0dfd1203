"""The interface of everything that is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.problem import DEVICE, Problem


class Unavailable(Exception):
    """Why an implementation cannot take part, in one sentence."""


class Unsuited(Exception):
    """The case is none of this implementation's: nothing is missing."""


class Subject(ABC):
    """One implementation at work on the layers of ``problems``, which share their cursors.

    Raises Unsuited or Unavailable when it cannot serve them.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems, self.case = problems, problems[0].case
        self.histories: Sequence[int] = [0]

    @abstractmethod
    def step(self, layer: int, i: int) -> Tensor:
        """Run step ``i`` of a layer, without waiting; outputs ``[batch, T, channels]``."""

    @abstractmethod
    def bytes(self) -> float:
        """Bytes that this method must move in a step, mean over its cycle."""

    @classmethod
    def held_against(cls, case: Case) -> Case:
        """The case whose reference the outputs must equal."""
        return case

    @classmethod
    def checked_rows(cls, case: Case) -> int:
        """Rows of the check. Larger batches may take other forms of a kernel: ours are held to the reference by tests/gpu."""
        return 3

    def work(self, layer: int) -> object:
        """What a timed step of a layer launches."""
        return self.step(layer, 0)

    def cycle(self) -> list[int]:
        """Tokens in the ring before each step of a cycle; one entry where there is no ring."""
        return [0]

    def place(self, histories: Sequence[int]) -> None:
        """Set the cursors so that row r has ``histories[r % len(histories)]`` tokens in its ring."""
        self.histories = histories

    def commit(self, accepted: int) -> None:
        """Keep the first ``accepted`` tokens of the last step, in all rows and layers."""
        assert accepted == self.case.tokens, "without a ring or snapshots nothing can be rejected"

    def per_row(self, histories: Sequence[int]) -> Tensor:
        """int32 ``[batch]``, on the device."""
        rows = torch.arange(self.case.batch) % len(histories)
        return torch.tensor(histories, dtype=torch.int32)[rows].to(DEVICE)


class Ringed(Subject):
    """With a ring like ours, unless it says otherwise."""

    def bytes(self) -> float:
        return self.case.replay_bytes()

    def cycle(self) -> list[int]:
        return self.case.cycle()


def only_for(suits: bool) -> None:
    """Raises Unsuited unless ``suits``."""
    if not suits:
        raise Unsuited
