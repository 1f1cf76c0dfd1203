"""Times ``replayssm::mamba2`` over a whole window of the ring, against the bytes it has to move.

    python benchmarks/mamba2.py --batch 1 32 256 --state float32 bfloat16 --tokens 1 4 8 --json mamba2.json

With T = 1 every step of a window is timed, from the empty ring to the step that folds it; ``mean`` is their mean, what a
request pays a token. ``mixed`` is one step of a batch whose rows are spread over the window, as in a running server, and
``standard`` the same layer with a window of 1: the ordinary recurrence, which reads and writes the state at every token.
With more tokens the ring is half full and ``flush`` is a step that folds it. ``--prefill`` times one chunk of that many
tokens. ``of_floor`` is the time that the bytes of a step take at the copy bandwidth of the same run over the measured time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from timing import Timer, launches_for

from trtllm_replayssm.plugins.cursors import STEP_WORDS
from trtllm_replayssm.plugins.device import mamba2 as device
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import slot_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

#: heads, head_dim, state_size, groups
MODELS = {"nano": (64, 64, 128, 8), "super": (128, 64, 128, 8), "super-tp8": (16, 64, 128, 1)}
BASE = 1000  # folded tokens of every slot: an ordinary place in a long request


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    tokens: int
    state: torch.dtype
    window: int = 16

    @property
    def attributes(self) -> Mamba2Attributes:
        draft = self.tokens if 1 < self.tokens <= MAX_VERIFY_TOKENS else 0
        return Mamba2Attributes(*MODELS[self.model], self.window, self.window + draft)

    @property
    def absorbs(self) -> bool:
        """Whether a step that folds takes its own tokens up too."""
        return self.tokens == 1 or self.tokens > MAX_VERIFY_TOKENS

    def floor_bytes(self, history: int, folds: bool) -> int:
        """Bytes of a step whose rows all have ``history`` ring entries."""
        a, two = self.attributes, 2
        state = a.num_heads * a.head_dim * a.state_size * self.state.itemsize
        entry = (a.num_heads * a.head_dim + a.n_groups * a.state_size) * two + a.num_heads * 4
        token = (2 * a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size + a.num_heads) * two
        appended = 0 if folds and self.absorbs else entry * self.tokens
        return self.batch * (state * (1 + folds) + entry * history + appended + token * self.tokens)


class Run:
    """Captured steps of a case, each on tensors of its own; all find the same plan, which ``time`` sets."""

    def __init__(self, case: Case, timer: Timer, heads: int | None) -> None:
        self.case = case
        self.step = torch.zeros(case.batch, STEP_WORDS, dtype=torch.int32, device="cuda")
        layers = launches_for(case.floor_bytes(0, False))
        self.measure = timer.captured([self.layer(heads) for _ in range(layers)])

    def layer(self, heads: int | None) -> Callable[[], None]:
        case, a, b, act = self.case, self.case.attributes, self.case.batch, torch.bfloat16
        pools = {name: pool.allocate(b, "cuda") for name, pool in a.pools(act, case.state, act).items()}
        for name, pool in pools.items():
            pool.uniform_(0.01, 0.2) if name == "ring_dt" else pool.normal_()
        width = a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size
        xbc = torch.randn(b, case.tokens, width, dtype=act, device="cuda")
        dt = torch.randn(b, case.tokens, a.num_heads, dtype=act, device="cuda") - 3
        A_log, dt_bias, D = (torch.rand(a.num_heads, device="cuda") for _ in range(3))
        y = torch.empty(b, case.tokens, a.num_heads * a.head_dim, dtype=act, device="cuda")
        bound = tuple(pools.values())
        strides = (xbc.stride(1), dt.stride(1), *map(slot_stride, bound))
        record = device.launch_record(a, act, case.state, act, b, case.tokens, strides)
        if heads is not None:
            record = replace(record, grid=(a.num_heads // heads, b, 1), integers=(*record.integers[:-1], heads))
        inputs, outputs = (xbc, dt, A_log, dt_bias, D, self.step, *bound), (y, *bound)
        return lambda: launch(record, inputs, outputs)

    def time(self, histories: list[int], folds: list[bool]) -> float:
        tokens, rows = self.case.tokens, self.case.batch
        plan = torch.zeros(rows, STEP_WORDS, dtype=torch.int32)
        for row in range(rows):
            history, fold = histories[row % len(histories)], folds[row % len(folds)]
            committed = BASE + history
            plan[row, :5] = torch.tensor(
                [row, committed, BASE, committed + tokens * self.case.absorbs if fold else BASE, tokens],
                dtype=torch.int32,
            )
        self.step.copy_(plan)
        return self.measure()


def measure(case: Case, timer: Timer, bandwidth: float, heads: int | None) -> dict[str, object]:
    run, window = Run(case, timer, heads), case.window
    result: dict[str, object] = {
        "model": case.model,
        "batch": case.batch,
        "tokens": case.tokens,
        "state": str(case.state).split(".")[1],
    }

    def fraction(histories: list[int], folds: list[bool], time: float) -> float:
        total = statistics.mean(case.floor_bytes(h, f) for h, f in zip(histories, folds, strict=True))
        return total / bandwidth * 1e-6 / time

    if case.tokens == 1:
        histories, folds = list(range(window)), [h == window - 1 for h in range(window)]
        times = [run.time([h], [f]) for h, f in zip(histories, folds, strict=True)]
        mean, mixed = statistics.mean(times), run.time(histories, folds)
        result |= {"h0": times[0], "h8": times[8], "flush": times[-1], "mean": mean, "mixed": mixed, "times": times}
        result |= {
            "mean_of_floor": fraction(histories, folds, mean),
            "mixed_of_floor": fraction(histories, folds, mixed),
        }
        result["h8_of_floor"] = fraction([8], [False], times[8])
        result["standard"] = Run(replace(case, window=1), timer, heads).time([0], [True])
        result["speed_up"] = result["standard"] / mean
    elif case.absorbs:
        result["prefill"] = run.time([0], [True])
    else:
        half = (window - case.tokens) // 2
        result |= {"step": run.time([half], [False]), "flush": run.time([window], [True])}
        result["step_of_floor"] = fraction([half], [False], result["step"])
        result["flush_of_floor"] = fraction([window], [True], result["flush"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["nano"], choices=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--state", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefill", nargs="*", type=int, default=[], help="tokens of a chunk, timed at batch 1 and 8")
    parser.add_argument("--heads_per_block", type=int, help="override the launch's own choice")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    timer = Timer(options.repeats)
    bandwidth = timer.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.2f} TB/s")
    steps = [(tokens, batch) for tokens in options.tokens for batch in options.batch]
    steps += [(tokens, batch) for tokens in options.prefill for batch in (1, 8)]
    results = []
    for model, state, (tokens, batch) in product(options.model, options.state, steps):
        case = Case(model, batch, tokens, getattr(torch, state))
        results.append(measure(case, timer, bandwidth, options.heads_per_block))
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in results[-1].items() if k != "times"}
        print(*(f"{k}={v}" for k, v in shown.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
