"""A batch of requests from beginning to end, by the scheduler's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtllm_replayssm.runtime.outputs import RequestId
from trtllm_replayssm.runtime.request import Request, check_request
from trtllm_replayssm.runtime.scheduler import Scheduler

#: Called with a request's id and the text that became certain.
OnText = Callable[[RequestId, str], None]


def generate(
    scheduler: Scheduler, requests: Sequence[Request], on_text: OnText = lambda request_id, text: None
) -> None:
    """Run the requests until each has a finish_reason; none may be in the scheduler before.

    Raises UserError, before anything runs, for prompts that do not fit. Any other exception ends them all.
    """
    for request in requests:
        check_request(scheduler.session.engine, request)
    try:
        for request in requests:
            scheduler.submit(request)
        while scheduler.busy:
            for update in scheduler.step():
                if update.error is not None:
                    raise update.error
                if update.text:
                    on_text(update.request_id, update.text)
    except BaseException:
        scheduler.abandon()
        raise
