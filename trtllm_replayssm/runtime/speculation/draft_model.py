"""Drafts from a smaller model: another engine with the same vocabulary, whose session follows the requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import pad

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.slot_state import SlotState
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter
from trtllm_replayssm.runtime.speculation.drawing import Drawing


class DraftModelDrafter(Drafter):
    """Slot i of its session holds what it has read of the request in slot i of the target's.

    Only tokens that are final are committed. Drafts are read like drafts in a verification: the step that asks for the
    next one reads all of them again and is never committed, so that nothing of a rejected draft has to be taken back.
    """

    def __init__(self, engine: Engine, target: Engine) -> None:
        """Allocates the session. Raises UserError when the two engines do not fit together."""
        check_pair(engine, target)
        self.session, self.known = Session(engine), known_tokens(target)
        self.vocab_size = target.decoder.vocab_size

    def admit(self, slot: int) -> None:
        self.session.admit(slot)

    def save(self, slot: int) -> SlotState:
        return self.session.save(slot, "cpu")

    def restore(self, slot: int, state: SlotState) -> None:
        self.session.restore(slot, state)

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        drawing = Drawing({slot: c for slot, c in contexts.items() if self.has_room(c)}, self.session.engine)
        logits = self.catch_up({slot: contexts[slot].tokens for slot in drawing.open})
        while drawing.open:
            drawing.add(logits)
            drawn = {slot: drawing.tokens[slot] for slot in drawing.open}
            if drawn:
                logits = self.run(drawn, RowMode.DECODE, commit=False)
        return drawing.drafts()

    def has_room(self, context: Context) -> bool:
        """Whether this engine's caches hold the request and its drafts."""
        return len(context.tokens) < self.session.engine.config.max_seq_len

    def catch_up(self, texts: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Read and commit what is new of these texts; the logits ``[vocab]`` behind each."""
        chunk, few = self.session.engine.config.prefill_chunk, self.session.replay.verify_tokens
        behind: dict[int, Tensor] = {}
        while len(behind) < len(texts):
            held = self.session.committed()
            left = {slot: text[held[slot] :] for slot, text in texts.items() if slot not in behind}
            # A few tokens go into the ring as a verified step would put them there; more are folded at once.
            mode = RowMode.DECODE if max(map(len, left.values())) <= few else RowMode.ABSORB
            logits = self.run({slot: list(tokens[:chunk]) for slot, tokens in left.items()}, mode, commit=True)
            behind |= {slot: logits[slot] for slot, tokens in left.items() if len(tokens) <= chunk}
        return behind

    def run(self, pieces: Mapping[int, Sequence[int]], mode: RowMode, commit: bool) -> dict[int, Tensor]:
        """One step; the logits ``[vocab]`` behind each piece, in the target's vocabulary."""
        # A step of one token may fold it, and then it could not be left uncommitted: one of two never does.
        rows = Rows.of(pieces, width=1 if commit else 2)
        logits = rows.step(self.session, mode, last_only=True)[:, 0, : self.known]
        if commit:
            self.session.commit(rows.first, rows.lengths)
        padded = pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-math.inf)
        return {slot: padded[slot - rows.first] for slot in pieces}


def known_tokens(engine: Engine) -> int:
    """Ids that mean something; the embedding may have more rows."""
    return engine.config.checkpoint.num_tokens or engine.decoder.vocab_size


def check_pair(draft: Engine, target: Engine) -> None:
    """Raises UserError unless ``draft`` can draft for ``target``."""
    ours, theirs = known_tokens(draft), known_tokens(target)
    if ours != theirs:
        raise UserError(
            f"the draft model has {ours} tokens and the model has {theirs}; they must have the same vocabulary",
            "use a draft model of the same family",
        )
    if draft.config.max_batch_size < target.config.max_batch_size:
        raise UserError(
            f"the draft engine has {draft.config.max_batch_size} slots, fewer than the {target.config.max_batch_size}"
            " of the engine",
            f"build it with --max_batch_size {target.config.max_batch_size}",
        )
    if draft.config.replay.max_draft_len < target.config.replay.max_draft_len:
        raise UserError(
            f"the draft engine was built for {draft.config.replay.max_draft_len} drafts, the engine for"
            f" {target.config.replay.max_draft_len}",
            f"build the draft engine with --max_draft_len {target.config.replay.max_draft_len}",
        )
