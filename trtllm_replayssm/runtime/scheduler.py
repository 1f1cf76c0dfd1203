"""In-flight batching: requests come and go between steps, and share the slots of one session.

A slot holds the whole state of one request: checkpoints, rings, convolution windows and a KV cache for ``max_seq_len``
tokens, ``EngineConfig.slot_bytes`` in all, allocated with the session. A free slot is therefore all that a request needs to
be admitted, and one that runs cannot run out of memory. Requests that were preempted are held in the CPU's memory.

One step is at most one token, or one verification of drafts, of every request that is through its prompt, and one prefill
chunk of every other. Each of the two has at most ``max_num_tokens`` tokens, so that a long prompt never holds up the others
for longer than a chunk.

The device does not wait for texts: what the tokens of a step mean, stop strings included, is dealt with when the next step
has been launched. Where no draft is made of tokens, it does not even wait for the host to know them: the next decode step
reads them where they are. With a drafter, or drafts of the caller, the host has to know the last tokens first. Either way, a
request may turn out to have ended when its next step is launched already: that row is computed for nothing, its tokens are
dropped, and its slot is free all the same.

Under tensor parallelism every rank makes the same calls; tokens and drafts are those of rank 0.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.flight import Flight, News
from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.launching import Launcher
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.placing import keep_prefixes, place, saved
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.sampling import NO_TOKEN
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.drafter import Drafter, draft_room
from trtllm_replayssm.runtime.speculation.drafting import drafts_for, kept_by
from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics

log = logging.getLogger(__name__)

#: Message and hint for a request whose logits are no numbers.
NO_NUMBERS = (
    "the model computed values that are no numbers (NaN, or infinite)",
    "the engine's file is damaged, or its activations overflow: build it again, or convert with --dtype bfloat16 or float32",
)


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
        self.launcher = Launcher(session)
        #: All requests by their id; those among them that wait, and those that have a slot.
        self.jobs: dict[RequestId, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        #: Steps whose tokens the host does not know yet, and tokens whose texts are not made yet.
        self.flights: list[Flight] = []
        self.untold: list[News] = []
        self.updates: list[Update] = []
        self.admissions = count()
        self.statistics = SpeculationStatistics()

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether another step has anything to do or to tell."""
        return bool(self.waiting or self.running or self.untold or self.updates)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UserError when it cannot be run, or when its id is in use."""
        if request.request_id in self.jobs:
            raise UserError(f"request {request.request_id} is running already", "give every request an id of its own")
        check_request(self.session.engine, request)
        job = self.jobs[request.request_id] = Job(request, self.max_draft_len)
        self.waiting.append(job)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now; the next step reports it. False when there is none of that id.

        Tokens that were chosen and did not reach the host yet are dropped.
        """
        self.tell_all()
        job = self.jobs.get(request_id)
        if job is None:
            return False
        self.forget(job)
        text = job.request.cancel()
        self.updates.append(Update(request_id, [], text, job.request.output()))
        return True

    def forget(self, job: Job) -> None:
        """The request has ended, wherever it is."""
        del self.jobs[job.request.request_id]
        if job.slot is not None:
            self.release(job)
        elif not job.over:
            self.waiting.remove(job)

    def release(self, job: Job) -> None:
        """The request needs no slot, for now or for good."""
        if job.slot is not None:
            del self.running[job.slot]
            self.launcher.sampler.penalties.release(job.slot)
            job.slot = None

    def abandon(self) -> None:
        """Drop all requests without a word."""
        for held in (self.jobs, self.waiting, self.running, self.flights, self.untold, self.updates):
            held.clear()

    def preempt(self, request_id: RequestId) -> bool:
        """Take a running request out of its slot; it goes on where it stood, after all that wait now. False if not running.

        Where there is no memory for its state, it ends with that error.
        """
        self.settle_all()
        self.tell_all()
        job = self.jobs.get(request_id)
        if job is None or job.slot is None:
            return False
        self.take_out(job.slot)
        return True

    def take_out(self, slot: int) -> None:
        """Empty a slot; whatever its request has said is on the host."""
        job = self.running[slot]
        try:
            job.saved = saved(slot, self.session, self.drafter)
        except Exception as error:
            self.end_all([job], error)
            return
        self.release(job)
        self.waiting.append(job)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Launch the next decode step, deal with what was launched before, admit what fits, and launch the next prefill.

        Returns what became of the requests since. An exception ends the requests that took part in what failed, with
        ``Update.error``, unless they have ended before; their slots are free again and the others go on. Where several
        ranks work together it is raised, because the ranks would no longer agree.
        """
        if any(job.decoding and job.request.next_drafts(1) for job in self.running.values()):
            self.settle_all()
        count = len(self.flights)
        self.launch({slot: job for slot, job in self.running.items() if job.decoding}, self.decode)
        before, self.flights = self.flights[:count], self.flights[count:]
        for flight in before:
            self.settle(flight)
        if before:
            self.tell_all()
        self.admit()
        self.launch({slot: job for slot, job in self.running.items() if job.prefilling}, self.launcher.prefill)
        if not self.running:
            # What is still under way is nobody's.
            self.flights.clear()
            self.tell_all()
        updates, self.updates = self.updates, []
        return updates

    def launch(self, jobs: Mapping[int, Job], action: Callable[[Mapping[int, Job]], Flight]) -> None:
        """Hand a step of these jobs to the device, tell what is untold meanwhile, and wait where the next step needs that."""
        if not jobs:
            return
        try:
            flight = action(jobs)
            self.flights.append(flight)
            self.tell_all()
            if self.drafter is not None or flight.verification is not None:
                self.settle_all()
            if self.prefix_cache is not None and not flight.decodes:
                kept = [slot for slot, job in jobs.items() if self.running.get(slot) is job]
                keep_prefixes(self.prefix_cache, flight, kept, self.session.hidden)
        except Exception as error:
            if self.session.engine.group is None:
                # Who has said its last token before needs nothing of this step.
                self.settle_all()
            self.end_all(jobs.values(), error)

    def end_all(self, jobs: Iterable[Job], error: Exception) -> None:
        """End those of these requests that have not ended with the tokens they have."""
        if self.session.engine.group is not None:
            raise error
        log.debug("a step failed", exc_info=error)
        self.fail(jobs, error)

    def fail(self, jobs: Iterable[Job], error: Exception) -> None:
        """The same for what every rank knows."""
        self.tell_all()
        for job in jobs:
            if self.lives(job):
                self.forget(job)
                self.updates.append(Update(job.request.request_id, [], "", error=error))

    def admit(self) -> None:
        """Fill free slots in the order of arrival; those whose time is up make room first."""
        if self.expired():
            # Some of those that run may turn out to have ended.
            self.settle_all()
            self.tell_all()
            for slot in self.expired():
                self.take_out(slot)
        for slot in range(self.session.max_batch_size):
            if slot not in self.running and self.waiting:
                self.place(slot, self.waiting.popleft())

    def expired(self) -> list[int]:
        """Slots of requests whose time is up, as many as are missing, the longest admitted first."""
        missing = len(self.waiting) + len(self.running) - self.session.max_batch_size
        if self.time_slice is None or missing <= 0:
            return []
        by_age = sorted(self.running.items(), key=lambda item: item[1].admitted)
        return [slot for slot, job in by_age if job.said - job.since >= self.time_slice][:missing]

    def place(self, slot: int, job: Job) -> None:
        job.admitted, job.since = next(self.admissions), len(job.request.tokens)
        self.running[slot], job.slot = job, slot
        try:
            self.launcher.sampler.place(slot, job.request)
            place(job, slot, self.session, self.drafter, self.prefix_cache)
        except Exception as error:
            self.end_all([job], error)

    def decode(self, jobs: Mapping[int, Job]) -> Flight:
        """One token, or one verification of drafts, for requests that are through their prompt."""
        return self.launcher.decode(jobs, drafts_for(jobs, self.drafter, self.session.replay.max_draft_len))

    # ---- what steps brought ------------------------------------------------------------------------------------------

    def settle_all(self) -> None:
        """Deal with every step that was launched."""
        flights, self.flights = self.flights, []
        for flight in flights:
            self.settle(flight)

    def settle(self, flight: Flight) -> None:
        """Give the requests that still run their tokens, and tell the drafter what those that go on have read."""
        try:
            tokens = self.launcher.tokens(flight)
            for slot, new in tokens.items():
                if self.running.get(slot) is not flight.jobs[slot]:
                    continue
                chosen = [token for token in new if token != NO_TOKEN]
                if chosen:
                    self.take(flight, slot, chosen)
                # Behind the end of a text it does not matter what a step with drafts computed.
                if len(chosen) < len(new) and not flight.jobs[slot].over:
                    self.fail([flight.jobs[slot]], EngineError(*NO_NUMBERS))
            if self.drafter is not None:
                read = [slot for slot, job in flight.jobs.items() if self.running.get(slot) is job]
                self.drafter.observe(kept_by(flight, read, tokens, self.session.hidden))
        except Exception as error:
            self.end_all(flight.jobs.values(), error)

    def take(self, flight: Flight, slot: int, tokens: Sequence[int]) -> None:
        """A request has these tokens, up to the one that ends it; then its slot is free."""
        job, drafted, added = flight.jobs[slot], flight.drafted(slot), 0
        if job.draft_length is not None:
            job.draft_length.update(drafted, len(tokens) - 1)
        while added < len(tokens) and not job.over:
            job.over = job.request.append(tokens[added])
            added += 1
        if flight.decodes:
            job.request.statistics.count(drafted, added)
            self.statistics.count(drafted, added)
        if job.over:
            self.release(job)
        self.untold.append(News(job, slot, added, flight.kept))

    def tell_all(self) -> None:
        """Make texts of all tokens that requests have, and end those that a stop string ends."""
        untold, self.untold = self.untold, []
        for news in untold:
            if self.lives(news.job):
                self.tell(news)

    def lives(self, job: Job) -> bool:
        return self.jobs.get(job.request.request_id) is job

    def tell(self, news: News) -> None:
        """What fails here is the request's own fault."""
        request, before, text = news.job.request, news.job.request.told, ""
        try:
            for place in range(news.count):
                text += request.tell(*news.kept_of(place))
                if request.finish_reason is not None:
                    self.forget(news.job)
                    break
        except Exception as error:
            self.end_all([news.job], error)
            return
        output = None if request.finish_reason is None else request.output()
        self.updates.append(Update(request.request_id, request.tokens[before : request.told], text, output))
