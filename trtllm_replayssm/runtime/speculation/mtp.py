"""Drafts from the checkpoint's own multi-token prediction head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.sampling import mask_padding
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter, Kept
from trtllm_replayssm.runtime.speculation.drawing import Drawing


class MtpDrafter(Drafter):
    """Runs the head of the session's decoder.

    At position p the head reads the decoder's hidden state there and the token at p + 1; its KV caches are pools of the
    session with a row for each position, so they are preempted with it, and rejected drafts are overwritten. For a second
    draft and more, where the decoder has not been, the head's own output takes the place of the hidden state.
    """

    def __init__(self, session: Session) -> None:
        """Raises UserError when the checkpoint has no head that can draft."""
        decoder, layout = session.engine.decoder, session.layout
        if decoder.mtp is None:
            raise UserError(
                "the engine has no multi-token prediction head", "use speculative_decoding_mode ngram or draft_model"
            )
        if any(pool.kind != "kv" for name, pool in layout.items() if name.startswith("mtp.")):
            raise UserError(
                "the multi-token prediction head has recurrent layers, which cannot draft",
                "use speculative_decoding_mode ngram or draft_model",
            )
        self.session = session
        #: The head's output ``[hidden_size]`` at the last position that the decoder has read, by slot.
        self.latest: dict[int, Tensor] = {}

    def admit(self, slot: int) -> None:
        self.latest.pop(slot, None)

    def save(self, slot: int) -> Tensor | None:
        latest = self.latest.get(slot)
        return None if latest is None else latest.cpu()

    def restore(self, slot: int, state: Tensor | None) -> None:
        self.admit(slot)
        if state is not None:
            self.latest[slot] = state.to(self.session.engine.device)

    def observe(self, kept: Mapping[int, Kept]) -> None:
        self.latest |= self.run(kept)

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        drawing = Drawing({slot: c for slot, c in contexts.items() if slot in self.latest}, self.session.engine)
        outputs = {slot: self.latest[slot] for slot in drawing.open}
        while outputs:
            drawing.add(self.logits(outputs))
            drafts = {slot: drawing.tokens[slot] for slot in drawing.open}
            behind = {slot: len(contexts[slot].tokens) - 2 for slot in drafts}
            outputs = self.run(
                {slot: Kept(behind[slot] + len(d), outputs[slot][None], d[-1:]) for slot, d in drafts.items()}
            )
        return drawing.drafts()

    @torch.no_grad()
    def run(self, pieces: Mapping[int, Kept]) -> dict[int, Tensor]:
        """The head's output ``[hidden_size]`` at the last position of each piece; their keys and values are cached."""
        if not pieces:
            return {}
        engine, rows = self.session.engine, Rows.of({slot: piece.following for slot, piece in pieces.items()})
        count, tokens = rows.token_ids.shape
        step = torch.zeros(count, STEP_WORDS, dtype=torch.int32)
        step[:, Step.SLOT] = -1
        hidden = torch.zeros(
            count, tokens, engine.decoder.hidden_size, dtype=engine.config.checkpoint.torch_dtype, device=engine.device
        )
        for slot, piece in pieces.items():
            row, length = slot - rows.first, len(piece.following)
            step[row, Step.SLOT], step[row, Step.COMMITTED], step[row, Step.QUERY_LEN] = row, piece.start, length
            hidden[row, :length] = piece.hidden
        end = int((step[:, Step.COMMITTED] + step[:, Step.QUERY_LEN]).max())
        here = slice(rows.first, rows.first + count)
        net = self.session.network(here, step.to(engine.device), kv_len=end)
        out = engine.decoder.predicted(net, rows.token_ids.to(engine.device), hidden, self.session.replay)
        return {slot: out[slot - rows.first, len(piece.following) - 1] for slot, piece in pieces.items()}

    @torch.no_grad()
    def logits(self, outputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The head's logits ``[vocab]`` by slot."""
        engine = self.session.engine
        net = self.session.network(slice(0, 1), torch.zeros(1, STEP_WORDS, dtype=torch.int32, device=engine.device), 0)
        logits = engine.decoder.logits(net, torch.stack(list(outputs.values()))[:, None])[:, 0]
        masked = mask_padding(logits, engine.config.checkpoint.num_tokens)
        return dict(zip(outputs, masked))
