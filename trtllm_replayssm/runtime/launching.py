"""Hands steps to the session, and gets their tokens back: one chunk of prompts, one token, or a verification of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.agreement import agreed
from trtllm_replayssm.runtime.flight import Flight, Verification
from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.logprobs import KeptLogits
from trtllm_replayssm.runtime.readback import Arriving
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.sampler import Sampler
from trtllm_replayssm.runtime.sampling import NO_TOKEN, SamplingParams, mask_padding, to_device
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Draft
from trtllm_replayssm.runtime.speculation.verification import verify

#: Decides what stays of a draft; see ``verify``.
Judge = Callable[[Tensor, Sequence[int], Draft, SamplingParams, int], list[int]]


class Launcher:
    """Steps of one session. Nothing waits for the device before ``tokens``."""

    def __init__(self, session: Session, judge: Judge = verify) -> None:
        self.session, self.judge = session, judge
        self.sampler = Sampler(session)

    def prefill(self, jobs: Mapping[int, Job]) -> Flight:
        """The next chunk of these prompts; a prompt's last chunk gives its first token."""
        chunk = self.session.engine.config.prefill_chunk
        starts = {slot: job.prefilled for slot, job in jobs.items()}
        pieces = {slot: job.request.prompt[starts[slot] : starts[slot] + chunk] for slot, job in jobs.items()}
        rows = Rows.of(pieces)
        logits = self.run(rows, RowMode.ABSORB)
        self.session.commit(rows.first, rows.lengths)
        for slot, job in jobs.items():
            job.prefilled += len(pieces[slot])
        behind = {slot: job.request.prompt[starts[slot] + 1 : job.prefilled + 1] for slot, job in jobs.items()}
        complete = {slot: job for slot, job in jobs.items() if not job.prefilling}
        return self.one_each(Flight(rows.first, False, jobs, complete, starts, behind), logits)

    def decode(self, jobs: Mapping[int, Job], drafts: Mapping[int, Draft]) -> Flight:
        """One token, or one verification of drafts, for requests that are through their prompt."""
        starts = {slot: job.position - 1 for slot, job in jobs.items()}
        if any(draft.tokens for draft in drafts.values()):
            return self.verification(jobs, drafts, starts)
        slots = range(min(jobs), max(jobs) + 1)
        lengths = [int(slot in jobs) for slot in slots]
        rows = Rows(slots.start, self.sampler.latest[slots.start : slots.stop], lengths)
        logits = self.run(rows, RowMode.DECODE)
        self.session.commit(rows.first, lengths)
        return self.one_each(Flight(rows.first, True, jobs, jobs, starts, dict.fromkeys(jobs, ())), logits)

    def run(self, rows: Rows, mode: RowMode) -> Tensor:
        """Logits ``[rows, T, vocab]``, of the last token only after a prefill chunk."""
        logits = rows.step(self.session, mode, last_only=mode == RowMode.ABSORB)
        return mask_padding(logits, self.session.engine.config.checkpoint.num_tokens, in_place=True)

    def one_each(self, flight: Flight, logits: Tensor) -> Flight:
        """Choose one token for each request of a step that is committed already."""
        if not flight.takers:
            return flight
        told, _ = self.sampler.choose(logits, flight.first, flight.takers, {})
        tokens = self.sampler.agree(told).clamp(min=0)
        slots = list(flight.takers)
        places = to_device([slot - flight.first for slot in slots], torch.long, tokens.device)
        self.sampler.keep(slots, tokens[:, 0].index_select(0, places))
        flight.tokens, flight.kept = Arriving(told), kept_logits(flight, logits, tokens)
        for job in flight.takers.values():
            job.ahead += 1
        return flight

    def verification(self, jobs: Mapping[int, Job], drafts: Mapping[int, Draft], starts: Mapping[int, int]) -> Flight:
        """A step that reads the newest token and the draft of each slot, and commits nothing yet."""
        pieces = {slot: [job.request.history[-1], *drafts[slot].tokens] for slot, job in jobs.items()}
        rows = Rows.of(pieces)
        logits = self.run(rows, RowMode.DECODE)
        own, judged = self.sampler.choose(logits, rows.first, jobs, {slot: drafts[slot].tokens for slot in jobs})
        nothing, found = dict.fromkeys(jobs, ()), Verification(drafts, logits, judged)
        return Flight(rows.first, True, jobs, jobs, starts, nothing, Arriving(own), verification=found)

    # ---- what a step brought -----------------------------------------------------------------------------------------

    def tokens(self, flight: Flight) -> dict[int, list[int]]:
        """New tokens of each slot, once they are on the host; those of rank 0 on every rank.

        NO_TOKEN stands behind those that could be chosen, where logits were no numbers.
        """
        if flight.tokens is None:
            return {}
        own = flight.tokens.get().tolist()
        if flight.verification is not None:
            return self.judged(flight, flight.verification, own)
        for job in flight.takers.values():
            job.ahead -= 1
        return {slot: own[slot - flight.first][:1] for slot in flight.takers}

    def judged(self, flight: Flight, verification: Verification, own: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """The tokens that stay of a step with drafts, and commit them."""
        found = []
        for slot, job in flight.takers.items():
            row, draft = slot - flight.first, verification.drafts[slot]
            found.append(self.judge(verification.judged[row], own[row], draft, job.request.params, job.position))
        length = self.session.replay.verify_tokens
        tokens = dict(zip(flight.takers, agreed(found, length, self.session.engine)))
        sound = {slot: [token for token in new if token != NO_TOKEN] for slot, new in tokens.items()}
        # What stays is the token that was known and the drafts that were right: as many as there are new tokens.
        counts = [len(sound.get(slot, ())) for slot in range(flight.first, max(tokens) + 1)]
        self.session.commit(flight.first, counts)
        device = verification.logits.device
        said = [(slot, token) for slot, new in sound.items() for token in new]
        self.sampler.keep([slot for slot, _ in said], to_device([token for _, token in said], torch.long, device))
        if any(job.request.keeps_logits for job in flight.takers.values()):
            width = verification.logits.shape[1]
            table = [(sound.get(flight.first + row, []) + [0] * width)[:width] for row in range(len(counts))]
            chosen = to_device([token for row in table for token in row], torch.long, device).view(-1, width)
            flight.kept = kept_logits(flight, verification.logits, chosen)
        return tokens


def kept_logits(flight: Flight, logits: Tensor, tokens: Tensor) -> KeptLogits | None:
    """What the requests of a step keep of its logits; None where they keep nothing."""
    requests = {slot: job.request for slot, job in flight.takers.items() if job.request.keeps_logits}
    return KeptLogits(logits, tokens, flight.first, requests) if requests else None
