"""Compiles, in several processes, the variants among which fla's tuners choose, so that a benchmark finds them compiled.

One prefill of fla runs through about ten Triton kernels, whose tuners compile some sixty variants one after another at first
use: minutes. Here every process takes its share of each tuner's variants. Triton keeps what it compiled (``~/.triton/cache``);
the benchmark's own tuners then measure all variants and choose as they always do.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import Case
from benchmarks.peers import loader
from trtllm_replayssm.errors import UserError

#: Processes that compile at most; each holds a CUDA context.
MOST_PROCESSES = 16


def compile_fla(folder: Path, cases: list[Case], processes: int | None) -> Iterator[str]:
    """Compile what prefills of these cases need; yields a line for each case. Raises UserError when fla cannot be had."""
    count = processes or min(MOST_PROCESSES, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        for case in cases:
            begun = time.monotonic()
            failures = [
                text for text in pool.starmap(compile_share, [(folder, case, i, count) for i in range(count)]) if text
            ]
            if failures:
                raise UserError(f"fla's variants for {case.model} cannot be compiled: {failures[0]}")
            yield f"fla {case.kind} {case.model}: compiled by {count} processes in {time.monotonic() - begun:.0f} s"


def compile_share(folder: Path, case: Case, index: int, count: int) -> str:
    """Run a prefill whose tuners know every ``count``-th variant from ``index`` on; why it failed, or nothing."""
    from benchmarks.peers.delta_rule import Fla
    from benchmarks.problem import Problem
    from benchmarks.subject import Unavailable

    loader.use_folder(folder)
    loader.tune_quickly()
    keep_share(index, count)
    try:
        Fla([Problem.random(case)]).step(0, 0)
        torch.cuda.synchronize()
    except Unavailable as reason:
        return str(reason)
    return ""


def keep_share(index: int, count: int) -> None:
    """Make Triton's tuners of this process choose among every ``count``-th of their variants, or take the first."""
    from triton.runtime.autotuner import Autotuner

    all_variants: Any = Autotuner.prune_configs

    def share(self: Any, arguments: Any) -> Any:
        variants = all_variants(self, arguments)
        return variants[index::count] or variants[:1]

    Autotuner.prune_configs = share
