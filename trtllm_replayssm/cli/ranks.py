"""A command on every rank of an engine: in processes of its own, or in those that torchrun started."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_replayssm.cli.process import prepare_streams, signals_end_waiting
from trtllm_replayssm.console import start_logging

#: What a command does with its arguments; importable by its name. Returns the exit status.
Work = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class RankJob:
    """What a new process is to do. It knows nothing of its parent's log level."""

    work: Work
    args: argparse.Namespace


def on_every_rank(world_size: int, work: Work, args: argparse.Namespace) -> int:
    """``work(args)`` on all ranks, of which this process may be one; returns the exit status.

    Raises as run_ranks does, and whatever ``work`` raises in this process.
    """
    from trtllm_replayssm.runtime.ranks import run_ranks, started_by_torchrun

    if world_size == 1:
        return work(args)
    if started_by_torchrun():
        with signals_end_waiting():
            return work(args)
    return run_ranks(world_size, carry_out, RankJob(work, args), args.device)


def carry_out(job: RankJob) -> int:
    """In a process that ``run_ranks`` started."""
    prepare_streams()
    start_logging(job.args.log_level)
    return job.work(job.args)
