"""The convolution before a Mamba-2 step, the step alone, and both behind each other, as a model's layer runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.cases import Case
from benchmarks.ours import Replay
from benchmarks.problem import ACTIVATION, DEVICE, Problem
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.device.causal_conv import causal_conv
from trtllm_replayssm.tuning.timing import Timer, launches_for

BATCHES, KERNEL = (1, 32, 256), 4


class Convolved(Replay):
    """The layer's step behind the convolution of its activations; they are the convolution's inputs here."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        channels = problems[0].inputs[0].shape[-1]
        self.conv = CausalConvAttributes(channels, KERNEL, KERNEL - 1 + self.case.tokens)
        pool = self.conv.pools(ACTIVATION)["conv_ring"]
        self.rings = [pool.allocate(self.case.batch, DEVICE).normal_() for _ in problems]
        self.weight = torch.randn(channels, KERNEL, dtype=ACTIVATION, device=DEVICE)
        self.bias = torch.randn(channels, dtype=ACTIVATION, device=DEVICE)

    def convolve(self, layer: int) -> torch.Tensor:
        x = self.problems[layer].inputs[0][0]
        return causal_conv(self.conv, x, self.weight, self.bias, self.step_info, self.rings[layer])

    def both(self, layer: int) -> torch.Tensor:
        problem = self.problems[layer]
        inputs = (self.convolve(layer), *(x[0] for x in problem.inputs[1:]))
        return self.run(self.attributes, *inputs, *problem.weights, self.step_info, self.pools[layer])


def compare(timer: Timer) -> Iterator[str]:
    """Markdown lines of a table: microseconds, means over a window."""
    yield "| state | batch | convolution | step | both | both / step |"
    yield "|---|---|---|---|---|---|"
    for state in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            case = Case("mamba2", "nemotron-3-nano", batch, 1, state)
            problems = [Problem.random(case) for _ in range(launches_for(case.step_bytes(0)))]
            subject, layers = Convolved(problems), range(len(problems))
            conv, step, both = (
                mean_over_window(subject, timer.captured([partial(work, i) for i in layers]))
                for work in (subject.convolve, subject.work, subject.both)
            )
            name = str(state).removeprefix("torch.")
            yield f"| {name} | {batch} | {conv:.1f} | {step:.1f} | {both:.1f} | {both / step:.2f} |"


def mean_over_window(subject: Replay, run: Callable[[], float]) -> float:
    times = []
    for history in subject.cycle():
        subject.place([history])
        times.append(run())
    return statistics.mean(times)
