"""A thread that carries responses to their clients, so that the stepping thread never waits for one.

While a response is on its way, the tokens that follow wait and go out together with the next: when clients are slow, or many,
responses get longer and steps do not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import Protocol

from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.triton.replies import Reply, Tensors

log = logging.getLogger(__name__)


class Channel(Protocol):
    """The way back to one client."""

    def send(self, tensors: Tensors, final: bool) -> None: ...

    def fail(self, error: Exception) -> None:
        """The last response: an error."""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""


class Parcel:
    """What one client is still to get."""

    def __init__(self, reply: Reply, channel: Channel) -> None:
        self.reply, self.channel = reply, channel
        self.updates: list[Update] = []
        self.cancelled = False


class Delivery:
    """Takes updates in the stepping thread and sends responses in its own."""

    def __init__(
        self,
        cancel: Callable[[RequestId], None],
        finished: Callable[[Reply, Update], None],
        pause: Callable[[], None],
        check_period: float,
    ) -> None:
        """cancel: called for requests whose client has left. finished: called with the last update of a request, before it
        is sent. check_period: seconds between looks whether clients have left; pause: called as often."""
        self.cancel, self.finished, self.pause, self.check_period = cancel, finished, pause, check_period
        #: Parcels of all requests that are not finished, and those among them that have something to send, in turn.
        self.open: dict[RequestId, Parcel] = {}
        self.waiting: deque[Parcel] = deque()
        self.changed = Condition()
        self.closing = False
        self.checked = time.monotonic()
        self.thread = Thread(target=self.run, name="trtllm-replayssm-delivery", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Send what there is to send, and stop."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    def add(self, reply: Reply, channel: Channel) -> None:
        """A request whose updates will come."""
        with self.changed:
            self.open[reply.request.request_id] = Parcel(reply, channel)

    def put(self, update: Update) -> None:
        """Have this sent."""
        with self.changed:
            parcel = self.open.get(update.request_id)
            if parcel is None:
                return
            if not parcel.updates:
                self.waiting.append(parcel)
            parcel.updates.append(update)
            if update.finished:
                del self.open[update.request_id]
            self.changed.notify()

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error, send that, and stop."""
        with self.changed:
            requests = list(self.open)
        for request_id in requests:
            self.put(Update(request_id, [], "", error=error))
        self.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self.changed:
                if not self.waiting and not self.closing:
                    self.changed.wait(max(0.0, self.checked + self.check_period - time.monotonic()))
                parcel = self.waiting.popleft() if self.waiting else None
                updates = []
                if parcel is not None:
                    updates, parcel.updates = parcel.updates, []
                elif self.closing:
                    break
            if parcel is not None:
                self.deliver(parcel, updates)
            if time.monotonic() >= self.checked + self.check_period:
                self.look()
                self.checked = time.monotonic()
        self.look()

    def deliver(self, parcel: Parcel, updates: list[Update]) -> None:
        last, reply = updates[-1], parcel.reply
        try:
            if last.finished:
                self.finished(reply, last)
            if last.error is not None:
                parcel.channel.fail(last.error)
            elif (tensors := reply.tensors(updates)) is not None:
                parcel.channel.send(tensors, final=last.finished)
        except Exception:
            log.debug("a response to request %s was not taken", reply.request.request_id, exc_info=True)
            if last.finished:
                return
            self.leave(parcel)

    def look(self) -> None:
        """See whose client has left, and do what is done now and then. Nothing of that may end the thread."""
        with self.changed:
            parcels = list(self.open.values())
        try:
            for parcel in parcels:
                if not parcel.cancelled and parcel.channel.is_cancelled():
                    self.leave(parcel)
            self.pause()
        except Exception:
            log.exception("the server's state could not be read or told")

    def leave(self, parcel: Parcel) -> None:
        """The client has left; its request ends soon."""
        parcel.cancelled = True
        self.cancel(parcel.reply.request.request_id)
