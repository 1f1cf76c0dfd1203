"""The scheduler behind an asyncio front: any number of coroutines stream from one session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.scheduler import Scheduler


class AsyncScheduler:
    """Steps a scheduler in a thread of its own for as long as there are requests.

        async with AsyncScheduler(scheduler) as front:
            async for update in front.generate(request):
                ...

    The scheduler is touched by the thread during a step and by the event loop between steps, never by both at once.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Raises UserError for an engine of several ranks, whose other ranks would not know of the requests."""
        if scheduler.session.engine.group is not None:
            raise UserError("an engine of several ranks cannot be driven by one of them", "use LLM under torchrun")
        self.scheduler = scheduler
        self.streams: dict[RequestId, asyncio.Queue[Update]] = {}
        self.actions: list[Callable[[], object]] = []
        self.wake = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "trtllm-replayssm-step")
        self.loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncScheduler:
        self.loop = asyncio.create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops after the step at hand. Streams that are still open end with an error."""
        assert self.loop is not None
        self.loop.cancel()
        await asyncio.gather(self.loop, return_exceptions=True)
        self.thread.shutdown()
        self.end_streams(UserError("the server was stopped before the request was finished"))

    async def generate(self, request: Request) -> AsyncIterator[Update]:
        """The request's updates; the last one is ``finished``. Leaving the loop early cancels the request.

        Raises UserError, before anything runs, when the request cannot be run or its id is in use.
        """
        request_id = request.request_id
        if self.loop is None or self.loop.done():
            raise UserError("the scheduler is not running", "use it inside: async with AsyncScheduler(...)")
        if request_id in self.streams:
            raise UserError(f"request {request_id} is running already", "give every request an id of its own")
        check_request(self.scheduler.session.engine, request)
        updates = self.streams[request_id] = asyncio.Queue()
        self.soon(lambda: self.scheduler.submit(request))
        finished = False
        try:
            while not finished:
                update = await updates.get()
                finished = update.finished
                yield update
        finally:
            if not finished:
                self.soon(lambda: self.scheduler.cancel(request_id))
                # Until then the id stays in use; nobody listens any more.
                self.soon(lambda: self.streams.pop(request_id, None))
            else:
                self.streams.pop(request_id, None)

    def soon(self, action: Callable[[], object]) -> None:
        """Have this done between steps."""
        self.actions.append(action)
        self.wake.set()

    async def run(self) -> None:
        """Step until the front is closed. What a step cannot attribute to a request ends all of them."""
        try:
            await self.step_forever()
        except Exception as error:
            self.end_streams(error)
            raise

    async def step_forever(self) -> None:
        """Step while there is anything to do; sleep otherwise."""
        while True:
            actions, self.actions = self.actions, []
            for action in actions:
                action()
            if not self.scheduler.busy:
                self.wake.clear()
                await self.wake.wait()
                continue
            # A step cannot be stopped half way; whoever cancels this waits for it.
            step = asyncio.get_running_loop().run_in_executor(self.thread, self.scheduler.step)
            try:
                updates = await asyncio.shield(step)
            except asyncio.CancelledError:
                await asyncio.wait([step])
                raise
            for update in updates:
                if (stream := self.streams.get(update.request_id)) is not None:
                    stream.put_nowait(update)

    def end_streams(self, error: Exception) -> None:
        for request_id, stream in self.streams.items():
            stream.put_nowait(Update(request_id, [], "", error=error))
