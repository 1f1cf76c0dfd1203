"""Ranks of a tensor-parallel engine behind one model: rank 0 talks to Triton, the others do what it does.

The tokens of a step are those of rank 0, and everything else that a scheduler decides follows from the calls that it gets:
ranks that get the same calls in the same order stay together.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch.multiprocessing as mp

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.ranks import join_group, lost_ranks, rank_main, receive, wait_for_any
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.triton import MODEL_FILE_VARIABLE
from trtllm_replayssm.triton.options import ServingOptions

#: A call of the scheduler's: its name and arguments.
Call = tuple[Any, ...]
#: How long ranks that were told to end are waited for, in seconds.
END_SECONDS = 5.0


class Ranks:
    """The other ranks, as seen from rank 0."""

    def __init__(self, processes: list[Any], orders: list[Connection], reports: list[Connection], folder: str) -> None:
        """folder: where the ranks find one another; removed with them."""
        self.processes, self.orders, self.reports, self.folder = processes, orders, reports, folder
        self.closing = False

    @classmethod
    def start(cls, options: ServingOptions, version_folder: Path, lost: Callable[[Exception], None]) -> Ranks | None:
        """Start the other ranks and join their group; None for an engine of one rank.

        lost: called in a thread of its own when one of them ends by itself.
        """
        world_size = options.check(version_folder).world_size
        if world_size == 1:
            return None
        context, device = mp.get_context("spawn"), options.device or None
        # With serve in its own folder, which goes with it however the model ends.
        file = os.environ.get(MODEL_FILE_VARIABLE)
        folder = tempfile.mkdtemp(prefix="trtllm-replayssm-", dir=os.path.dirname(file) if file else None)
        store = os.path.join(folder, "store")
        ranks = cls([], [], [], folder)
        for rank in range(1, world_size):
            order, listener = context.Pipe()
            reader, writer = context.Pipe(duplex=False)
            argument = (options, version_folder, listener)
            process = context.Process(
                target=rank_main, args=(rank, world_size, device, store, writer, follow, argument), daemon=True
            )
            process.start()
            # Our copies; the rank's end is noticed when its own are closed.
            listener.close()
            writer.close()
            ranks.processes.append(process)
            ranks.orders.append(order)
            ranks.reports.append(reader)
        Thread(target=ranks.watch, args=(lost,), name="trtllm-replayssm-ranks", daemon=True).start()
        try:
            join_group(0, world_size, device, store)
        except BaseException:
            ranks.close()
            raise
        return ranks

    def tell(self, *call: Any) -> None:
        for order in self.orders:
            order.send(call)

    def watch(self, lost: Callable[[Exception], None]) -> None:
        wait([process.sentinel for process in self.processes])
        if self.closing:
            return
        # Before anything else: whoever is told may end this process at once.
        self.remove_folder()
        process = wait_for_any(self.processes)[0]
        place = self.processes.index(process)
        report = receive(self.reports[place])
        lost(EngineError(report.message or f"rank {place + 1} has ended with status {process.exitcode}", report.hint))

    def close(self) -> None:
        self.closing = True
        for order in self.orders:
            order.close()
        for process in self.processes:
            process.join(END_SECONDS)
            process.kill()
            process.join()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Ranks that have met need it no more, and those that have ended will not meet."""
        shutil.rmtree(self.folder, ignore_errors=True)


class LeadingScheduler:
    """Rank 0's scheduler; what is asked of it is asked of the other ranks too."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self.scheduler, self.ranks = scheduler, ranks

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(self, request: Request) -> None:
        self.ranks.tell("submit", request.request_id, request.prompt, request.params, request.drafts)
        self.scheduler.submit(request)

    def cancel(self, request_id: RequestId) -> bool:
        self.ranks.tell("cancel", request_id)
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Update]:
        with lost_ranks(len(self.ranks.processes) + 1):
            self.ranks.tell("step")
            return self.scheduler.step()

    def abandon(self) -> None:
        """The ranks are about to end; nothing is told any more."""
        self.scheduler.abandon()


def follow(argument: tuple[ServingOptions, Path, Connection]) -> int:
    """What a rank other than 0 does: load the engine, and do what rank 0 does, until it closes the connection."""
    options, version_folder, orders = argument
    llm = options.load(version_folder)
    llm.session.warm_up()
    calls: dict[str, Callable[..., object]] = {
        "submit": lambda request_id, prompt, params, drafts: llm.scheduler.submit(
            llm.request(request_id, None, prompt, params, drafts)
        ),
        "cancel": llm.scheduler.cancel,
        "step": llm.scheduler.step,
    }
    while True:
        try:
            name, *arguments = orders.recv()
        except EOFError:
            return 0
        try:
            calls[name](*arguments)
        except UserError:
            # Rank 0 has refused the request for the same reason, and said so.
            if name == "step":
                raise
