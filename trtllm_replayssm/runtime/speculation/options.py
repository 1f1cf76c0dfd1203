"""What a user asks of speculation, and the drafter that it means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculation.drafter import Drafter
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter

Mode = Literal["ngram", "draft_model", "mtp"]


@dataclass(frozen=True)
class SpeculationOptions:
    """mode: who drafts. max_draft_len: most drafts of a step; None for what the engine was built for.

    draft_engine_dir: engine folder of the draft model, for that mode alone. Raises UserError when they do not fit together.
    """

    mode: Mode
    max_draft_len: int | None = None
    draft_engine_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(
                f"speculative_decoding_mode {self.mode!r} is not known", f"use one of {', '.join(get_args(Mode))}"
            )
        if (self.mode == "draft_model") != (self.draft_engine_dir is not None):
            raise UserError(
                "draft_engine_dir and speculative_decoding_mode draft_model go together", "give both or none"
            )

    def drafter(self, session: Session) -> Drafter:
        """The drafter for this session. Raises UserError or EngineError when the engines do not allow it."""
        if self.draft_engine_dir is not None:
            engine = session.engine
            return DraftModelDrafter(Engine.load(self.draft_engine_dir, engine.rank, engine.device), engine)
        return MtpDrafter(session) if self.mode == "mtp" else NgramDrafter()
