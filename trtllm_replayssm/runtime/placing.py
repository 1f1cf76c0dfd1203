"""Requests on their way into a slot and out of it, and the prefixes of their prompts that are known or worth keeping."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from trtllm_replayssm.runtime.flight import Flight
from trtllm_replayssm.runtime.job import Job, Saved
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Drafter, Kept


def saved(slot: int, session: Session, drafter: Drafter | None) -> Saved:
    """The state of the slot in the CPU's memory."""
    drafted = None if drafter is None else drafter.save(slot)
    return Saved(session.save(slot, "cpu"), drafted)


def place(job: Job, slot: int, session: Session, drafter: Drafter | None, cache: PrefixCache | None) -> None:
    """Let a request go on in this slot where it stood, or begin behind what the prefix cache knows of its prompt."""
    held, job.saved = job.saved, None
    if held is not None:
        session.restore(slot, held.slot)
        if drafter is not None:
            drafter.restore(slot, held.drafter)
        return
    session.admit(slot)
    if drafter is not None:
        drafter.admit(slot)
    if cache is None:
        return
    prompt = job.request.prompt
    match = cache.resume(prompt, slot)
    job.prefilled = job.request.cached_tokens = match.resumed
    job.wanted = match.wanted
    if drafter is not None and match.hidden is not None:
        # The token behind the prefix is another one than when the prefix was read.
        drafter.observe({slot: Kept(match.resumed - 1, match.hidden[None], [prompt[match.resumed]])})


def keep_prefixes(cache: PrefixCache, flight: Flight, slots: Iterable[int], hidden: Tensor) -> None:
    """Give the prefix cache what it wants of these slots' prompts, once the drafter has read them, too.

    hidden: ``[rows, T, hidden_size]``, what the head read in the prefill.
    """
    for slot in slots:
        job = flight.jobs[slot]
        if job.prefilled in job.wanted:
            last = job.prefilled - flight.starts[slot] - 1
            cache.keep(job.request.prompt, job.prefilled, slot, hidden[slot - flight.first, last])
