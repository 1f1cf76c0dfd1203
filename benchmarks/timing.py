"""Timing of single kernels: CUDA-graph replay, cold L2, median of many, and the bandwidth of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

#: Bytes written between two measurements to empty the L2 cache; several times any present one.
FLUSH_BYTES = 256 << 20
#: Clock cycles the device waits before a measurement, so that the host has queued it whole.
HEAD_START_CYCLES = 150_000


class Timer:
    """Times functions that launch work on the current stream."""

    def __init__(self, repeats: int = 15) -> None:
        self.repeats = repeats
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def replayed(self, function: Callable[[], object]) -> Callable[[], None]:
        """``function`` captured in a CUDA graph, after a warm-up run that compiles what it needs."""
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def microseconds(self, run: Callable[[], object]) -> float:
        """Median device time of ``run`` with a cold L2."""
        run()
        times = []
        for _ in range(self.repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def copy_bandwidth(self) -> float:
        """TB/s of a 1 GiB device copy, counting bytes read and written."""
        source, target = (torch.empty(1 << 30, dtype=torch.int8, device="cuda") for _ in range(2))
        return 2 * source.numel() / self.microseconds(lambda: target.copy_(source)) * 1e-6
