"""Chooses the tokens of a session's slots, and keeps on the device what the next step needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trtllm_replayssm.runtime.agreement import agree
from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.penalties import Penalties
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import choose_all, to_device
from trtllm_replayssm.runtime.session import Session


class Sampler:
    """latest: int32 ``[slots, 1]``, the newest token of each slot, which a step can read before the host knows it."""

    def __init__(self, session: Session) -> None:
        self.engine = session.engine
        self.latest = torch.zeros(session.max_batch_size, 1, dtype=torch.int32, device=self.engine.device)
        self.penalties = Penalties(self.engine.decoder.vocab_size, self.engine.device)

    def place(self, slot: int, request: Request) -> None:
        """The slot belongs to this request from now on; the host knows all of its tokens."""
        self.penalties.place(slot, request)
        if request.tokens:
            self.latest[slot] = to_device(request.tokens[-1:], torch.int32, self.latest.device)

    def choose(
        self, logits: Tensor, first: int, jobs: Mapping[int, Job], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """What each request takes after every token of a step, int64 ``[rows, T]``; and the logits it was chosen from.

        logits: ``[rows, T, vocab]`` of the slots ``first ...``; they are left as they are. drafts: see Penalties.apply.
        """
        changed = self.penalties.apply(logits, first, jobs, drafts)
        asked = {slot - first: (job.request.params, job.position) for slot, job in jobs.items()}
        return choose_all(changed, asked), changed

    def keep(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Each of these slots has said the token in its place, int64 ``[n]``; of a slot's tokens the last one is its newest."""
        self.penalties.count(slots, tokens)
        last = {slot: place for place, slot in enumerate(slots)}
        newest = tokens if len(last) == len(slots) else tokens[to_device([*last.values()], torch.long, tokens.device)]
        self.latest.index_copy_(0, to_device([*last], torch.long, tokens.device), newest[:, None].int())

    def agree(self, tokens: Tensor) -> Tensor:
        """Rank 0's tokens on every rank, in place."""
        return agree(tokens, self.engine)
