"""Speculation whose success is set beforehand, so that speed can be measured without a trained model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_length import DraftLength
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter


class RepeatingDrafter(Drafter):
    """Drafts the last token over and over: the cheapest draft there is, which the model hardly ever accepts by itself."""

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        return {slot: Draft((context.tokens[-1],) * context.limit) for slot, context in contexts.items()}


class FixedDraftLength(DraftLength):
    @property
    def value(self) -> int:
        return self.longest


class ForcedScheduler(Scheduler):
    """Verifies as ever, and then keeps ``acceptance_length`` tokens of a step whatever the model says.

    The text means nothing. Every step drafts ``max_draft_len`` tokens, fewer only at the end of a request.
    """

    def __init__(self, session: Session, acceptance_length: int, max_draft_len: int | None = None) -> None:
        """Raises UserError when a step cannot keep so many tokens, or the engine not verify so many drafts."""
        super().__init__(session, RepeatingDrafter(), max_draft_len)
        if not 1 <= acceptance_length <= self.max_draft_len + 1:
            raise UserError(
                f"a step of {self.max_draft_len} drafts cannot keep {acceptance_length} tokens",
                f"use 1 to {self.max_draft_len + 1}",
            )
        self.acceptance_length = acceptance_length

    def chosen(self, logits: Tensor, first: int, drafts: Mapping[int, Draft]) -> dict[int, list[int]]:
        tokens = super().chosen(logits, first, drafts)
        return {slot: [*draft.tokens[: self.acceptance_length - 1], tokens[slot][-1]] for slot, draft in drafts.items()}

    def submit(self, request: Request) -> None:
        super().submit(request)
        # Never adapted: success is not what it would be.
        self.waiting[-1].draft_length = FixedDraftLength(self.max_draft_len)
