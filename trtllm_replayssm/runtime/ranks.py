"""The processes of a tensor-parallel engine: starting them, joining them, and ending them all when one is lost."""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.devices import resolve_device
from trtllm_replayssm.signals import signal_name

#: How long a rank waits for the others; loading weights from a slow disk counts.
TIMEOUT = timedelta(minutes=10)
#: After the first rank has failed, seconds in which the others may say why they fail too.
GRACE_SECONDS = 2.0
#: Exit status of a rank that reports an error to its parent.
REPORTED = 1


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def process_group(world_size: int, device: torch.device) -> dist.ProcessGroup | None:
    """The group of all ranks, joined here when torchrun started this process; None with one rank.

    Raises EngineError unless ``world_size`` processes are running.
    """
    joined = dist.is_available() and dist.is_initialized()
    running = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", 1))
    if running != world_size:
        raise EngineError(
            f"the engine was built for {world_size} ranks, but {running} are running",
            "trtllm-replayssm generate starts them by itself; "
            f"run other programs with: torchrun --nproc_per_node {world_size}",
        )
    if world_size == 1:
        return None
    if not joined:
        dist.init_process_group(backend(device), timeout=TIMEOUT)
        # A group that is still open when the interpreter ends may abort the process.
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD


def backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class LostRankError(EngineError):
    """Another process of the group has ended, for a reason that only it knows."""


@contextmanager
def lost_ranks(world_size: int) -> Iterator[None]:
    """Turns the failure of a collective, which means that another rank has ended, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if world_size > 1 and (isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text):
            raise LostRankError("another rank of the engine has ended, so this one cannot go on") from None
        raise


@dataclass(frozen=True)
class Report:
    """How a rank ended, in its own words. kind: ``nothing`` when it had no time for any."""

    kind: Literal["result", "error", "lost", "fault", "nothing"] = "nothing"
    result: int = 0
    message: str = ""
    hint: str = ""


def run_ranks(world_size: int, target: Callable[[Any], int], argument: Any, device: str | None = None) -> int:
    """Call ``target(argument)`` in ``world_size`` new processes that form a group; returns rank 0's result.

    target: importable by its name. device: as for Engine.load. When a rank fails, all are ended. Raises the UserError of a
    rank that had one, or EngineError saying which rank was lost and how.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="trtllm-replayssm-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=rank_main,
                args=(rank, world_size, device, f"{folder}/store", pipes[rank][1], target, argument),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            exit_codes = wait_for_all(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
    reports = [receive(reader) for reader, _ in pipes]
    if any(exit_codes):
        raise failure(exit_codes, reports)
    return reports[0].result


def wait_for_all(processes: list[Any]) -> list[int | None]:
    """Exit codes when all ranks have ended, or a moment after the first has failed; None for those still running."""
    deadline = math.inf
    while True:
        exit_codes = [process.exitcode for process in processes]
        if None not in exit_codes or time.monotonic() > deadline:
            return exit_codes
        if any(exit_codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        alive = [process for process, code in zip(processes, exit_codes) if code is None]
        wait_for_any(alive, None if deadline == math.inf else max(0.0, deadline - time.monotonic()))


def wait_for_any(processes: list[Any], timeout: float | None = None) -> list[Any]:
    """Those that have ended, once there are any, or after ``timeout`` seconds; their exit codes are known then.

    What a process closes on its way out tells of its end before there is an exit code: seconds before, where a GPU's
    context is taken down meanwhile.
    """
    ready = wait([process.sentinel for process in processes], timeout)
    ended = [process for process in processes if process.sentinel in ready]
    for process in ended:
        process.join()
    return ended


def receive(reader: Connection) -> Report:
    try:
        return reader.recv() if reader.poll() else Report()
    except EOFError:
        return Report()


def failure(exit_codes: list[int | None], reports: list[Report]) -> UserError:
    """The cause among the ranks' ends: a signal, then what a rank says is at fault, then any other status."""
    for rank, code in enumerate(exit_codes):
        if code is not None and code < 0:
            return EngineError(f"rank {rank} was ended by {signal_name(-code)}; all ranks were stopped")
    for kind in ("error", "fault", "lost"):
        for rank, report in enumerate(reports):
            if report.kind == kind:
                return EngineError(report.message if kind != "fault" else f"rank {rank}: {report.message}", report.hint)
    rank = next(i for i, code in enumerate(exit_codes) if code)
    return EngineError(f"rank {rank} ended with status {exit_codes[rank]}; all ranks were stopped")


def rank_main(
    rank: int,
    world_size: int,
    device: str | None,
    store: str,
    report: Connection,
    target: Callable[[Any], int],
    argument: Any,
) -> None:
    """What a started process does: join the group, call the target, report."""
    # An interrupt from the keyboard reaches every process; the parent answers it and ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=end_with_parent, daemon=True).start()
    try:
        join_group(rank, world_size, device, store)
        report.send(Report("result", target(argument)))
        dist.destroy_process_group()
        return
    except LostRankError as error:
        report.send(Report("lost", message=error.message))
    except UserError as error:
        report.send(Report("error", message=error.message, hint=error.hint))
    except Exception as error:
        report.send(Report("fault", message=f"{type(error).__name__}: {' '.join(str(error).split())}"))
    # Not by way of the interpreter's end, where the group would wait for ranks that do not come.
    sys.stdout.flush()
    os._exit(REPORTED)


def join_group(rank: int, world_size: int, device: str | None, store: str) -> None:
    """Make this process a rank of the group that meets in the file ``store``."""
    os.environ["LOCAL_RANK"] = str(rank)
    where = resolve_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    dist.init_process_group(backend(where), f"file://{store}", rank=rank, world_size=world_size, timeout=TIMEOUT)


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(REPORTED)
