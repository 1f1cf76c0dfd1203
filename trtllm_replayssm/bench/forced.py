"""Speculation whose success is set beforehand, so that speed can be measured without a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_length import DraftLength
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter
from trtllm_replayssm.runtime.speculation.verification import verify


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
        self.launcher.judge = self.judged

    def judged(
        self, logits: Tensor, own: Sequence[int], draft: Draft, params: SamplingParams, position: int
    ) -> list[int]:
        """As many tokens as were set: drafts, and behind them what the model says at the end of those it would keep."""
        last = verify(logits, own, draft, params, position)[-1]
        return [*draft.tokens[: self.acceptance_length - 1], last]

    def submit(self, request: Request) -> None:
        super().submit(request)
        # Never adapted: success is not what it would be.
        self.waiting[-1].draft_length = FixedDraftLength(self.max_draft_len)
