"""Between the scheduler and its drafter: who gets drafts, and what the drafter learns of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from trtllm_replayssm.runtime.flight import Flight
from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter, Kept


def drafts_for(jobs: Mapping[int, Job], drafter: Drafter | None, longest: int) -> dict[int, Draft]:
    """A draft for each slot, empty where there is none: the caller's while it is right, the drafter's otherwise.

    longest: most drafts that a step can verify. The last token of a request needs no draft.
    """
    given, contexts = {}, {}
    for slot, job in jobs.items():
        request, room = job.request, job.remaining - 1
        limit = 0 if job.draft_length is None else min(job.draft_length.value, room)
        if own := request.next_drafts(min(longest, room)):
            given[slot] = Draft(own)
        elif limit > 0:
            contexts[slot] = Context(request.history, request.params, limit)
    found = drafter.propose(contexts) if drafter is not None and contexts else {}
    return {slot: given.get(slot) or found.get(slot, Draft()) for slot in jobs}


def kept_by(
    flight: Flight, slots: Iterable[int], tokens: Mapping[int, Sequence[int]], hidden: Tensor
) -> dict[int, Kept]:
    """What these slots have read for good in the session's last step, which brought ``tokens``.

    hidden: ``[rows, T, hidden_size]``, what the head read in it.
    """
    kept = {}
    for slot in slots:
        behind = [*flight.behind[slot], *tokens.get(slot, ())]
        kept[slot] = Kept(flight.starts[slot], hidden[slot - flight.first, : len(behind)], behind)
    return kept
