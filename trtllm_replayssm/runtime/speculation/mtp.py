"""Drafts from the checkpoint's own multi-token prediction head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.prediction import Predicted
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.sampling import mask_padding
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter, Kept
from trtllm_replayssm.runtime.speculation.drawing import Drawing


class MtpDrafter(Drafter):
    """Runs the head of the session's decoder.

    At position p the head reads the decoder's hidden state there and the token at p + 1; its caches, and the rings of its
    indexers, are pools of the session that are addressed by position, so they are preempted with it, and rejected drafts are
    overwritten. For a second draft and more, where the decoder has not been, the head's own output takes the place of the
    hidden state.
    """

    def __init__(self, session: Session) -> None:
        """Raises UserError when the checkpoint has no head that can draft."""
        decoder, layout = session.engine.decoder, session.layout
        if decoder.mtp is None:
            raise UserError(
                "the engine has no multi-token prediction head", "use speculative_decoding_mode ngram or draft_model"
            )
        if any(pool.kind == "state" for name, pool in layout.items() if name.startswith("mtp.")):
            raise UserError(
                "the multi-token prediction head has recurrent layers, which cannot draft",
                "use speculative_decoding_mode ngram or draft_model",
            )
        self.session = session
        #: What the head says at the last position that the decoder has read, by slot.
        self.latest: dict[int, Predicted] = {}

    def admit(self, slot: int) -> None:
        self.latest.pop(slot, None)

    def save(self, slot: int) -> Predicted | None:
        latest = self.latest.get(slot)
        return None if latest is None else Predicted(*(tensor.cpu() for tensor in latest))

    def restore(self, slot: int, state: Predicted | None) -> None:
        self.admit(slot)
        if state is not None:
            self.latest[slot] = Predicted(*(tensor.to(self.session.engine.device) for tensor in state))

    def observe(self, kept: Mapping[int, Kept]) -> None:
        self.latest |= self.run(kept)

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        drawing = Drawing({slot: c for slot, c in contexts.items() if slot in self.latest}, self.session.engine)
        outputs = {slot: self.latest[slot] for slot in drawing.open}
        while outputs:
            drawing.add({slot: output.logits for slot, output in outputs.items()})
            drafts = {slot: drawing.tokens[slot] for slot in drawing.open}
            behind = {slot: len(contexts[slot].tokens) - 2 for slot in drafts}
            outputs = self.run(
                {slot: Kept(behind[slot] + len(d), outputs[slot].hidden[None], d[-1:]) for slot, d in drafts.items()}
            )
        return drawing.drafts()

    def run(self, pieces: Mapping[int, Kept]) -> dict[int, Predicted]:
        """What the head says at the last position of each piece; their keys and values are cached."""
        if not pieces:
            return {}
        engine, rows = self.session.engine, Rows.of({slot: piece.following for slot, piece in pieces.items()})
        hidden = torch.zeros(
            *rows.token_ids.shape,
            engine.decoder.hidden_size,
            dtype=engine.config.checkpoint.torch_dtype,
            device=engine.device,
        )
        starts = [0] * len(hidden)
        for slot, piece in pieces.items():
            starts[slot - rows.first] = piece.start
            hidden[slot - rows.first, : len(piece.following)] = piece.hidden
        out, logits = self.session.prediction.run(rows.first, rows.token_ids, starts, rows.lengths, hidden)
        masked = mask_padding(logits, engine.config.checkpoint.num_tokens)
        return {slot: Predicted(out[slot - rows.first], masked[slot - rows.first]) for slot in pieces}
