"""The scheduler behind asyncio: coroutines wait for tokens while a thread steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.stepping import SteppingThread


class AsyncScheduler:
    """Steps a scheduler in a thread of its own for as long as there are requests.

        async with AsyncScheduler(scheduler) as front:
            async for update in front.generate(request):
                ...

    A step that fails in a way that no request of its own explains ends all requests; the front goes on with new ones.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Raises UserError for an engine of several ranks, whose other ranks would not know of the requests."""
        if scheduler.session.engine.group is not None:
            raise UserError("an engine of several ranks cannot be driven by one of them", "use LLM under torchrun")
        self.engine = scheduler.session.engine
        self.stepping = SteppingThread(scheduler)
        self.streams: dict[RequestId, asyncio.Queue[Update]] = {}

    async def __aenter__(self) -> AsyncScheduler:
        self.stepping.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops after the step at hand. Streams that are still open end with an error."""
        await asyncio.to_thread(self.stepping.close)

    async def generate(self, request: Request) -> AsyncIterator[Update]:
        """The request's updates; the last one is ``finished``. Leaving the loop early cancels the request.

        Raises UserError, before anything runs, when the request cannot be run or its id is in use.
        """
        request_id, loop = request.request_id, asyncio.get_running_loop()
        if self.stepping.ended is not None:
            raise UserError("the scheduler is not running", "use it inside: async with AsyncScheduler(...)")
        if request_id in self.streams:
            raise UserError(f"request {request_id} is running already", "give every request an id of its own")
        check_request(self.engine, request)
        updates = self.streams[request_id] = asyncio.Queue()

        def receive(update: Update) -> None:
            loop.call_soon_threadsafe(self.arrive, update)

        self.stepping.submit(request, receive)
        finished = False
        try:
            while not finished:
                update = await updates.get()
                finished = update.finished
                yield update
        finally:
            if not finished:
                self.stepping.cancel(request_id)

    def arrive(self, update: Update) -> None:
        """Pass an update on. A finished request's id is free again; so is one's that was left, once it is cancelled."""
        self.streams[update.request_id].put_nowait(update)
        if update.finished:
            del self.streams[update.request_id]
