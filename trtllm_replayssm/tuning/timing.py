"""Timing of single kernels: CUDA-graph replay, cold L2, median of many, and the bandwidth of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

#: Bytes written between two measurements to empty the L2 cache; several times any present one.
FLUSH_BYTES = 256 << 20
#: Bytes that the launches of one graph should touch together, and how many they may be.
ROTATED_BYTES, MOST_LAUNCHES = 320 << 20, 96
#: What touches this much leaves no cache warm and takes long enough for a graph of two.
LARGE_BYTES = 1 << 30
#: Clock cycles the device waits before a measurement, so that the host has queued it whole.
HEAD_START_CYCLES = 150_000


def launches_for(bytes_each: int) -> int:
    """How many launches on different tensors to capture when one touches ``bytes_each``."""
    fewest = 4 if bytes_each < LARGE_BYTES else 2
    return max(fewest, min(MOST_LAUNCHES, -(-ROTATED_BYTES // bytes_each)))


class Timer:
    """Times functions that launch work on the current stream."""

    def __init__(self, repeats: int = 15) -> None:
        self.repeats = repeats
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def captured(self, launches: Sequence[Callable[[], object]]) -> Callable[[], float]:
        """A function that times ``launches``, captured one behind the other in a CUDA graph: microseconds a launch.

        They should be the same work on different tensors, together several times the L2 cache, as the layers of a model
        are: then each finds a cold cache, and the cost of starting and timing a graph is shared.
        """
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        return lambda: self.microseconds(graph.replay) / len(launches)

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
