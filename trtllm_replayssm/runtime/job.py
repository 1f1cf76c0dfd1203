"""A request between its submission and its end, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.slot_state import SlotState
from trtllm_replayssm.runtime.speculation.draft_length import DraftLength


@dataclass(frozen=True)
class Saved:
    """State of a preempted request, its drafter's included."""

    slot: SlotState
    drafter: Any


class Job:
    """A request in the scheduler's hands.

    prefilled: prompt tokens that its slot holds. admitted: order of admission. since: tokens it had when it was admitted.
    wanted: prefixes of the prompt that the prefix cache would like to keep, in tokens.
    """

    def __init__(self, request: Request, max_draft_len: int) -> None:
        self.request = request
        self.draft_length = DraftLength(max_draft_len) if max_draft_len else None
        self.prefilled = self.admitted = self.since = 0
        self.saved: Saved | None = None
        self.wanted: frozenset[int] = frozenset()

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt)
