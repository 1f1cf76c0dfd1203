"""A thread that steps a scheduler for as long as there are requests, and takes orders from any other thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Protocol

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.request import Request

log = logging.getLogger(__name__)

#: Takes a request's updates, in the stepping thread; the last one is ``finished``. Must return at once.
Receiver = Callable[[Update], None]


class Steppable(Protocol):
    """What the thread needs of a scheduler."""

    @property
    def busy(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: RequestId) -> bool: ...

    def step(self) -> list[Update]: ...

    def abandon(self) -> None: ...


class SteppingThread:
    """Owns a scheduler: nobody else may touch it between ``start`` and ``close``.

    Orders are carried out between steps. While nothing is running, the thread sleeps.
    """

    def __init__(
        self,
        scheduler: Steppable,
        after_step: Callable[[Sequence[Update], int], None] = lambda updates, began: None,
        lost: Callable[[Exception], None] | None = None,
    ) -> None:
        """after_step: called in the thread with what a step brought and when it began, in ns since the epoch, before the
        receivers are.

        lost: who is told when a step fails in a way that no request of its own explains, where the scheduler cannot go on
        after that; without it, all requests end with the error, and the thread goes on with new ones.
        """
        self.scheduler, self.after_step, self.lost = scheduler, after_step, lost
        self.receivers: dict[RequestId, Receiver] = {}
        #: What is to be done between steps, and what instead when the thread ends before.
        self.orders: list[tuple[Callable[[], object], Callable[[Exception], None]]] = []
        self.changed = Condition()
        #: Why no further request is taken; None while the thread runs.
        self.ended: Exception | None = UserError("the scheduler is not running")
        self.thread: Thread

    def start(self) -> None:
        """Begin, or begin again after ``close``."""
        self.ended = None
        self.thread = Thread(target=self.run, name="trtllm-replayssm-step", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop after the step at hand; requests that are not finished end with an error."""
        self.end(UserError("the server was stopped before the request was finished"))
        self.thread.join()

    def submit(self, request: Request, receive: Receiver) -> None:
        """Queue a request. What makes it impossible comes as an update with that error."""
        self.order(lambda: self.place(request, receive), otherwise=lambda error: receive(failed(request, error)))

    def cancel(self, request_id: RequestId) -> None:
        """End a request soon; its receiver is told. Nothing happens when there is none of that id."""
        self.order(lambda: self.scheduler.cancel(request_id))

    # ---- the thread --------------------------------------------------------------------------------------------------

    def order(self, action: Callable[[], object], otherwise: Callable[[Exception], None] = lambda error: None) -> None:
        """Have ``action`` done between steps, or ``otherwise`` when the thread has ended or ends before."""
        with self.changed:
            ended = self.ended
            if ended is None:
                self.orders.append((action, otherwise))
                self.changed.notify()
        if ended is not None:
            otherwise(ended)

    def end(self, error: Exception) -> None:
        with self.changed:
            self.ended = self.ended or error
            self.changed.notify()

    def place(self, request: Request, receive: Receiver) -> None:
        try:
            self.scheduler.submit(request)
        except UserError as error:
            receive(failed(request, error))
        else:
            self.receivers[request.request_id] = receive

    def run(self) -> None:
        while self.ended is None:
            with self.changed:
                while self.ended is None and not self.orders and not self.scheduler.busy:
                    self.changed.wait()
                orders, self.orders = iter(self.orders), []
            try:
                for action, otherwise in orders:
                    self.carry_out(action, otherwise)
                updates = self.step() if self.scheduler.busy else []
            except Exception as error:
                log.error(
                    "a step failed, and all requests with it: %s", error, exc_info=log.isEnabledFor(logging.DEBUG)
                )
                with self.changed:
                    # Those behind an order that failed are for what comes after it.
                    self.orders[:0] = orders
                self.fail(error)
            else:
                for update in updates:
                    self.deliver(update)
        with self.changed:
            left, self.orders = self.orders, []
        for _, otherwise in left:
            otherwise(self.ended)
        self.end_all(self.ended)

    @staticmethod
    def carry_out(action: Callable[[], object], otherwise: Callable[[Exception], None]) -> None:
        try:
            action()
        except Exception as error:
            otherwise(error)
            raise

    def step(self) -> list[Update]:
        began = time.time_ns()
        updates = self.scheduler.step()
        self.after_step(updates, began)
        return updates

    def fail(self, error: Exception) -> None:
        """No request of its own explains the error."""
        if self.lost is None:
            self.end_all(error)
        else:
            self.end(error)
            self.lost(error)

    def end_all(self, error: Exception) -> None:
        self.scheduler.abandon()
        for request_id in list(self.receivers):
            self.deliver(Update(request_id, [], "", error=error))

    def deliver(self, update: Update) -> None:
        receive = self.receivers.get(update.request_id)
        if update.finished:
            self.receivers.pop(update.request_id, None)
        if receive is None:
            return
        try:
            receive(update)
        except Exception:
            # Whoever asked is gone; the others are not to suffer.
            log.debug("nobody takes the updates of request %s", update.request_id, exc_info=True)


def failed(request: Request, error: Exception) -> Update:
    return Update(request.request_id, [], "", error=error)
