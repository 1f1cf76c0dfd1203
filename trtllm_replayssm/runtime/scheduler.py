"""In-flight batching: requests come and go between steps, and share the slots of one session.

A slot holds the whole state of one request: checkpoints, rings, convolution windows and a KV cache for ``max_seq_len``
tokens, ``EngineConfig.slot_bytes`` in all, allocated with the session. A free slot is therefore all that a request needs to
be admitted, and one that runs cannot run out of memory. Requests that were preempted are held in the CPU's memory.

One step is at most one prefill chunk of every request that is not through its prompt, and one token, or one verification of
drafts, of every other. A slot takes part in one of the two with no more than ``max_num_tokens / max_batch_size`` tokens, so
that a step never has more than ``max_num_tokens``, and a long prompt never holds up the others for longer than a chunk.

Under tensor parallelism every rank makes the same calls; tokens and drafts are those of rank 0.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.agreement import agreed
from trtllm_replayssm.runtime.job import Job, Saved
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.sampling import choose_all, mask_padding
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter, Kept, draft_room
from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics
from trtllm_replayssm.runtime.speculation.verification import verify

log = logging.getLogger(__name__)


class Scheduler:
    """Runs requests in a session, one step at a time.

    A request's tokens do not depend on the others: its prompt is cut where the build says, and tokens are chosen by its own
    seed and position.
    """

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None = None,
        max_draft_len: int | None = None,
        time_slice: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Slots that were in use are taken over.

        drafter, max_draft_len: who drafts, and how many tokens at most; by default what the engine was built for.
        time_slice: tokens after which a request makes room for one that waits, and queues up again; None for never.
        prefix_cache: of the same session; None to compute every prompt from its first token.

        Raises UserError when the engine cannot verify so many drafts, or for a time slice of no tokens.
        """
        longest = 0 if drafter is None else draft_room(session.replay, max_draft_len)
        if time_slice is not None and time_slice < 1:
            raise UserError(f"time_slice is {time_slice}", "use 1 token or more, or None")
        self.session, self.drafter, self.time_slice, self.prefix_cache = session, drafter, time_slice, prefix_cache
        self.max_draft_len = longest
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        self.updates: list[Update] = []
        self.admissions = count()
        self.statistics = SpeculationStatistics()

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether another step has anything to do or to tell."""
        return bool(self.waiting or self.running or self.updates)

    @property
    def saved_bytes(self) -> int:
        """CPU memory that preempted requests take, drafters apart."""
        return sum(job.saved.slot.nbytes for job in self.waiting if job.saved is not None)

    def jobs(self) -> Iterable[Job]:
        return (*self.running.values(), *self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UserError when it cannot be run, or when its id is in use."""
        if any(job.request.request_id == request.request_id for job in self.jobs()):
            raise UserError(f"request {request.request_id} is running already", "give every request an id of its own")
        check_request(self.session.engine, request)
        self.waiting.append(Job(request, self.max_draft_len))

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now; the next step reports it. False when there is none of that id."""
        for slot, job in list(self.running.items()):
            if job.request.request_id == request_id:
                del self.running[slot]
                return self.cancelled(job)
        for job in list(self.waiting):
            if job.request.request_id == request_id:
                self.waiting.remove(job)
                return self.cancelled(job)
        return False

    def cancelled(self, job: Job) -> bool:
        request = job.request
        text = request.cancel()
        self.updates.append(Update(request.request_id, [], text, request.output()))
        return True

    def abandon(self) -> None:
        """Drop all requests without a word."""
        self.waiting.clear()
        self.running.clear()
        self.updates.clear()

    def preempt(self, request_id: RequestId) -> bool:
        """Take a running request out of its slot; it goes on where it stood, after all that wait now. False if not running.

        Where there is no memory for its state, it ends with that error.
        """
        for slot, job in self.running.items():
            if job.request.request_id == request_id:
                self.take_out(slot)
                return True
        return False

    def take_out(self, slot: int) -> None:
        try:
            drafted = None if self.drafter is None else self.drafter.save(slot)
            saved = Saved(self.session.save(slot, "cpu"), drafted)
        except Exception as error:
            self.end_all([slot], error)
            return
        job = self.running.pop(slot)
        job.saved = saved
        self.waiting.append(job)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Admit what fits, run one step, and tell what it brought.

        An exception ends the requests that took part in what failed, with ``Update.error``; their slots are free again and
        the others go on. Where several ranks work together it is raised, because the ranks would no longer agree.
        """
        self.admit()
        prefilling = [slot for slot, job in self.running.items() if job.prefilling]
        decoding = [slot for slot, job in self.running.items() if not job.prefilling]
        for slots, action in ((prefilling, self.prefill), (decoding, self.decode)):
            if slots:
                try:
                    action(slots)
                except Exception as error:
                    self.end_all(slots, error)
        updates, self.updates = self.updates, []
        return updates

    def end_all(self, slots: Iterable[int], error: Exception) -> None:
        """End the requests that are still in these slots."""
        if self.session.engine.group is not None:
            raise error
        log.debug("a step failed", exc_info=error)
        for slot in slots:
            if (job := self.running.pop(slot, None)) is not None:
                self.updates.append(Update(job.request.request_id, [], "", error=error))

    def admit(self) -> None:
        """Fill free slots in the order of arrival; those whose time is up make room first."""
        free = [slot for slot in range(self.session.max_batch_size) if slot not in self.running]
        if self.time_slice is not None and len(self.waiting) > len(free):
            expired = [
                slot
                for slot, job in sorted(self.running.items(), key=lambda item: item[1].admitted)
                if len(job.request.tokens) - job.since >= self.time_slice
            ]
            for slot in expired[: len(self.waiting) - len(free)]:
                self.take_out(slot)
                free.append(slot)
        for slot in sorted(free)[: len(self.waiting)]:
            self.place(slot, self.waiting.popleft())

    def place(self, slot: int, job: Job) -> None:
        job.admitted, job.since = next(self.admissions), len(job.request.tokens)
        saved, job.saved = job.saved, None
        self.running[slot] = job
        try:
            if saved is None:
                self.session.admit(slot)
                if self.drafter is not None:
                    self.drafter.admit(slot)
                self.resume_prefix(slot, job)
            else:
                self.session.restore(slot, saved.slot)
                if self.drafter is not None:
                    self.drafter.restore(slot, saved.drafter)
        except Exception as error:
            self.end_all([slot], error)

    def resume_prefix(self, slot: int, job: Job) -> None:
        """Begin the prompt behind what the prefix cache knows of it."""
        if self.prefix_cache is None:
            return
        prompt = job.request.prompt
        match = self.prefix_cache.resume(prompt, slot)
        job.prefilled = job.request.cached_tokens = match.resumed
        job.wanted = match.wanted
        if self.drafter is not None and match.hidden is not None:
            # The token behind the prefix is another one than when the prefix was read.
            last = match.resumed - 1
            self.drafter.observe({slot: Kept(last, match.hidden[None], [prompt[match.resumed]])})

    def keep_prefixes(self, slots: Iterable[int], first: int, pieces: Mapping[int, list[int]]) -> None:
        """Give the prefix cache what it wants of the prompts that still run."""
        if self.prefix_cache is None:
            return
        for slot in slots:
            job = self.running.get(slot)
            if job is None or job.prefilled not in job.wanted:
                continue
            hidden = self.session.hidden[slot - first, len(pieces[slot]) - 1]
            try:
                self.prefix_cache.keep(job.request.prompt, job.prefilled, slot, hidden)
            except torch.OutOfMemoryError as error:
                if self.session.engine.group is not None:
                    raise
                log.warning("the prefix cache is emptied, because the device has no memory left: %s", error)
                self.prefix_cache.clear()

    def prefill(self, slots: list[int]) -> None:
        """The next chunk of these prompts; a prompt's last chunk gives its first token."""
        chunk = self.session.engine.config.prefill_chunk
        starts = {slot: self.running[slot].prefilled for slot in slots}
        pieces = {slot: self.running[slot].request.prompt[start : start + chunk] for slot, start in starts.items()}
        logits, first = self.run(pieces, RowMode.ABSORB)
        for slot, piece in pieces.items():
            self.running[slot].prefilled += len(piece)
        complete = [slot for slot in slots if not self.running[slot].prefilling]
        tokens = self.chosen(logits, first, {slot: Draft() for slot in complete})
        self.commit(pieces, first)
        following = {}
        for slot in slots:
            prompt, end = self.running[slot].request.prompt, self.running[slot].prefilled
            following[slot] = prompt[starts[slot] + 1 : end + 1] + tokens.get(slot, [])
        self.finish_step(tokens, logits, first, following, starts)
        self.keep_prefixes(slots, first, pieces)

    def decode(self, slots: list[int]) -> None:
        """One token, or one verification of drafts, for requests that are through their prompt."""
        drafts = self.drafts(slots)
        pieces = {slot: [self.running[slot].request.history[-1], *drafts[slot].tokens] for slot in slots}
        starts = {slot: self.running[slot].request.position - 1 for slot in slots}
        logits, first = self.run(pieces, RowMode.DECODE)
        tokens = self.chosen(logits, first, drafts)
        # What stays is the token that was known and the drafts that were right: as many as there are new tokens.
        self.commit(tokens, first)
        for slot, new in tokens.items():
            job, drafted = self.running[slot], len(drafts[slot].tokens)
            job.request.statistics.count(drafted, len(new))
            self.statistics.count(drafted, len(new))
            if job.draft_length is not None:
                job.draft_length.update(drafted, len(new) - 1)
        self.finish_step(tokens, logits, first, tokens, starts)

    def drafts(self, slots: list[int]) -> dict[int, Draft]:
        """A draft for each slot, empty where there is none: the caller's while it is right, the drafter's otherwise.

        The last token of a request needs no draft.
        """
        given, contexts, longest = {}, {}, self.session.replay.max_draft_len
        for slot in slots:
            job = self.running[slot]
            request, room = job.request, job.request.remaining - 1
            limit = 0 if job.draft_length is None else min(job.draft_length.value, room)
            if own := request.next_drafts(min(longest, room)):
                given[slot] = Draft(own)
            elif limit > 0:
                contexts[slot] = Context(request.history, request.params, limit)
        found = self.drafter.propose(contexts) if self.drafter is not None and contexts else {}
        return {slot: given.get(slot) or found.get(slot, Draft()) for slot in slots}

    # ---- parts of a step ---------------------------------------------------------------------------------------------

    def run(self, pieces: Mapping[int, list[int]], mode: RowMode) -> tuple[Tensor, int]:
        """Logits ``[rows, T, vocab]``, of the last token only after a prefill chunk, and the slot of row 0."""
        rows = Rows.of(pieces)
        logits = rows.step(self.session, mode, last_only=mode == RowMode.ABSORB)
        return mask_padding(logits, self.session.engine.config.checkpoint.num_tokens, in_place=True), rows.first

    def chosen(self, logits: Tensor, first: int, drafts: Mapping[int, Draft]) -> dict[int, list[int]]:
        """New tokens of each slot; those of rank 0 on every rank."""
        if not drafts:
            return {}
        requests = {slot: self.running[slot].request for slot in drafts}
        own = choose_all(logits, {slot - first: (r.params, r.position) for slot, r in requests.items()})
        tokens = []
        for slot, draft in drafts.items():
            request, row = requests[slot], slot - first
            one = not draft.tokens
            new = own[row][:1] if one else verify(logits[row], own[row], draft, request.params, request.position)
            tokens.append(new)
        return dict(zip(drafts, agreed(tokens, self.session.replay.verify_tokens, self.session.engine)))

    def commit(self, kept: Mapping[int, list[int]], first: int) -> None:
        self.session.commit(first, [len(kept.get(slot, ())) for slot in range(first, max(kept) + 1)])

    def finish_step(
        self,
        tokens: Mapping[int, list[int]],
        logits: Tensor,
        first: int,
        following: Mapping[int, list[int]],
        starts: Mapping[int, int],
    ) -> None:
        """Hand out the new tokens, and tell the drafter what the requests that go on have read.

        following: per slot, the tokens behind those that were committed; starts: position of the first of them.
        """
        for slot, new in tokens.items():
            try:
                self.hand_out(slot, new, logits[slot - first] if self.running[slot].request.keeps_logits else None)
            except Exception as error:
                self.end_all([slot], error)
        if self.drafter is None:
            return
        kept = {}
        for slot, behind in following.items():
            if slot in self.running:
                hidden = self.session.hidden[slot - first, : len(behind)]
                kept[slot] = Kept(starts[slot], hidden, behind)
        if kept:
            self.drafter.observe(kept)

    def hand_out(self, slot: int, tokens: list[int], logits: Tensor | None) -> None:
        """Give a request its tokens, up to the one that ends it; logits: ``[T, vocab]``, of each, if it keeps them."""
        request, text, before = self.running[slot].request, "", len(self.running[slot].request.tokens)
        for i, token in enumerate(tokens):
            text += request.take(token, None if logits is None else logits[i])
            if request.finish_reason is not None:
                del self.running[slot]
                break
        output = None if request.finish_reason is None else request.output()
        self.updates.append(Update(request.request_id, request.tokens[before:], text, output))
