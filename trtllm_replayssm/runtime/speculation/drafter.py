"""What the scheduler asks of a drafter, and what it gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Context:
    """A request that could use drafts. tokens: prompt and output so far. limit: most drafts, 1 or more."""

    tokens: Sequence[int]
    params: SamplingParams
    limit: int


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of one request.

    probabilities: float64 ``[drafts, vocab]``, the distribution that each token was drawn from; None for tokens that follow
    from the context without chance.
    """

    tokens: tuple[int, ...] = ()
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class Kept:
    """Tokens of one request that its model has read for good.

    start: position of the first. hidden: ``[n, hidden_size]``, what the head read at each. following: the n tokens behind
    each of them, the newest one included.
    """

    start: int
    hidden: Tensor
    following: Sequence[int]


def draft_room(replay: ReplayConfig, wanted: int | None) -> int:
    """Most drafts of a step: as many as are wanted, None for all that the engine was built for.

    Raises UserError when the engine cannot verify so many, or none are wanted.
    """
    built = replay.max_draft_len
    if built == 0:
        raise UserError(
            "the engine was built without room for drafts (max_draft_len 0)",
            "build it with --max_draft_len 3, for example",
        )
    longest = built if wanted is None else wanted
    if not 1 <= longest <= built:
        raise UserError(f"max_draft_len is {wanted}; the engine was built for {built} drafts", f"use 1 to {built}")
    return longest


class Drafter(ABC):
    """Proposes tokens for the requests in a session's slots."""

    def admit(self, slot: int) -> None:  # noqa: B027 (most drafters need none)
        """The slot belongs to a new request from now on."""

    def save(self, slot: int) -> Any:  # noqa: B027
        """What ``restore`` needs when the request comes back, to any slot."""

    def restore(self, slot: int, state: Any) -> None:
        """The slot belongs to a request that was saved."""
        self.admit(slot)

    def observe(self, kept: Mapping[int, Kept]) -> None:  # noqa: B027
        """Called for the slots of every step, prefill included, once it is known what stays."""

    @abstractmethod
    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        """Drafts by slot, at most ``limit`` tokens each; slots without any may be missing."""
