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

    slot: None while it waits, and when it is over. over: it has said its last token, and only its text is left. prefilled:
    prompt tokens that its slot holds. ahead: tokens that were chosen on the device and that the request does not have yet.
    admitted: order of admission. since: tokens it had when it was admitted. wanted: prefixes of the prompt that the prefix
    cache would like to keep, in tokens.
    """

    def __init__(self, request: Request, max_draft_len: int) -> None:
        self.request = request
        self.draft_length = DraftLength(max_draft_len) if max_draft_len else None
        self.slot: int | None = None
        self.prefilled = self.ahead = self.admitted = self.since = 0
        self.over = False
        self.saved: Saved | None = None
        self.wanted: frozenset[int] = frozenset()

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt)

    @property
    def decoding(self) -> bool:
        return not self.prefilling and self.remaining > 0

    @property
    def said(self) -> int:
        """Tokens that were generated."""
        return len(self.request.tokens) + self.ahead

    @property
    def position(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.request.history) + self.ahead

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated, unless one of those under way turns out to be the last."""
        return self.request.limit - self.said
