"""Times ``replayssm::gated_delta`` and ``replayssm::kda`` over a whole window, against the bytes they have to move.

    python benchmarks/delta_rule.py --model qwen3.5-35b kimi-linear --batch 1 32 256 --tokens 1 4 8 --json delta.json

With T = 1 every step of a window is timed, from the empty ring to the step that folds it; ``mean`` is their mean, what a
request pays a token. ``mixed`` is one step of a batch whose rows are spread over the window, as in a running server, and
``standard`` the same layer with a window of 1: the ordinary recurrence, which reads and writes the state at every token.
With more tokens the ring holds what it holds on average, and ``flush`` is a step that folds a full ring. ``--prefill``
times one chunk of that many tokens. ``of_floor`` is the time that the bytes of a step take at the copy bandwidth of the
same run over the measured time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_replayssm.plugins.cursors import STEP_WORDS
from trtllm_replayssm.plugins.device import delta_rule as device
from trtllm_replayssm.plugins.device import gated_delta, kda
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.tuning.timing import Timer, launches_for

#: Key heads and value heads; every head is 128 x 128. One head count: KDA.
MODELS = {
    "qwen3.5-35b": (16, 32),
    "qwen3.5-122b": (16, 64),
    "qwen3.5-122b-tp8": (2, 8),
    "kimi-linear": (32,),
    "ling-tiny": (16,),
}
DIM = 128
BASE = 1000  # folded tokens of every slot: an ordinary place in a long request
ACTIVATION = torch.bfloat16


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    tokens: int
    state: torch.dtype
    window: int = 16

    @property
    def per_channel(self) -> bool:
        return len(MODELS[self.model]) == 1

    @property
    def heads(self) -> tuple[int, int]:
        return MODELS[self.model][0], MODELS[self.model][-1]

    @property
    def attributes(self) -> GatedDeltaAttributes | KdaAttributes:
        ring_rows = self.window + (self.tokens if 1 < self.tokens <= 16 else 0)
        if self.per_channel:
            return KdaAttributes(self.heads[1], DIM, DIM, self.window, ring_rows)
        return GatedDeltaAttributes(*self.heads, DIM, DIM, self.window, ring_rows)

    @property
    def shape(self) -> device.DeltaShape:
        attributes = self.attributes
        return kda.shape_of(attributes) if isinstance(attributes, KdaAttributes) else gated_delta.shape_of(attributes)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of qkv, decay logits and beta logits."""
        keys, values = self.heads
        return (2 * keys + values) * DIM, values * (DIM if self.per_channel else 1), values

    def floor_bytes(self, history: int, folds: bool, absorbs: bool) -> int:
        """Bytes of a step whose rows all have ``history`` ring entries."""
        keys, values = self.heads
        state = values * DIM * DIM * self.state.itemsize
        entry = (keys + values) * DIM * 2 + values * 4 * (1 + (DIM if self.per_channel else 1))
        token = (sum(self.widths) + values * DIM) * 2
        appended = 0 if absorbs else entry * self.tokens
        return self.batch * (state * (1 + folds) + entry * history + appended + token * self.tokens)


class Run:
    """A case's layers, as many as keep the cache cold, captured together; ``time`` sets what their step finds."""

    def __init__(self, case: Case, timer: Timer, split: int | None) -> None:
        self.case = case
        self.step = torch.zeros(case.batch, STEP_WORDS, dtype=torch.int32, device="cuda")
        layers = launches_for(case.floor_bytes(0, False, False))
        self.measure = timer.captured([self.layer(split) for _ in range(layers)])

    def layer(self, split: int | None) -> Callable[[], None]:
        case, rows, tokens, values = self.case, self.case.batch, self.case.tokens, self.case.heads[1]
        pools = {
            n: p.allocate(rows, "cuda") for n, p in case.attributes.pools(ACTIVATION, case.state, ACTIVATION).items()
        }
        for name, pool in pools.items():
            pool.uniform_(-0.2, 0) if name == "ring_g" else pool.uniform_(
                0, 1
            ) if name == "ring_beta" else pool.normal_()
        inputs = tuple(torch.randn(rows, tokens, n, dtype=ACTIVATION, device="cuda") for n in case.widths)
        A_log, dt_bias = torch.rand(values, device="cuda"), torch.rand(case.widths[1], device="cuda")
        o = torch.empty(rows, tokens, values * DIM, dtype=ACTIVATION, device="cuda")
        bound = device.pool_tensors(pools)
        strides = device.strides_of(*inputs, bound)
        record = device.launch_record(case.shape, ACTIVATION, case.state, ACTIVATION, rows, tokens, strides)
        if split is not None:
            kernel = device.variant(case.shape, ACTIVATION, case.state, ACTIVATION, tokens, split, True)
            record = type(record)(kernel, (values * split, rows, 1), record.integers)
        arguments = (*inputs, A_log, dt_bias, self.step, *bound), (o, *bound)
        return lambda: launch(record, *arguments)

    def time(self, histories: list[int], folds: list[bool], absorbs: bool) -> float:
        rows = torch.arange(self.case.batch, dtype=torch.int32)
        history = torch.tensor(histories, dtype=torch.int32)[rows % len(histories)]
        fold = torch.tensor(folds)[rows % len(folds)]
        committed = BASE + history
        fold_to = torch.where(fold, committed + (self.case.tokens if absorbs else 0), BASE)
        plan = torch.zeros(len(rows), STEP_WORDS, dtype=torch.int32)
        plan[:, 0], plan[:, 1], plan[:, 2], plan[:, 3], plan[:, 4] = rows, committed, BASE, fold_to, self.case.tokens
        self.step.copy_(plan)
        return self.measure()


def measure(case: Case, timer: Timer, bandwidth: float, split: int | None) -> dict[str, object]:
    run, window, tokens = Run(case, timer, split), case.window, case.tokens
    name = str(case.state).split(".")[1]
    result: dict[str, object] = {"model": case.model, "batch": case.batch, "tokens": tokens, "state": name}

    def record(label: str, histories: list[int], folds: list[bool], absorbs: bool, time: float | None = None) -> None:
        time = run.time(histories, folds, absorbs) if time is None else time
        total = statistics.mean(case.floor_bytes(h, f, f and absorbs) for h, f in zip(histories, folds, strict=True))
        result[label] = time
        result[f"{label}_of_floor"] = total / bandwidth * 1e-6 / time

    if tokens == 1:
        histories, folds = list(range(window)), [h == window - 1 for h in range(window)]
        times = [run.time([h], [f], True) for h, f in zip(histories, folds, strict=True)]
        result["times"] = times
        record("mean", histories, folds, True, statistics.mean(times))
        record("h0", [0], [False], True, times[0])
        record("h8", [8], [False], True, times[8])
        record("flush", [window - 1], [True], True, times[-1])
        record("mixed", histories, folds, True)
        record("standard", [0], [True], True)
    elif tokens <= 16:
        record("step", [(window - tokens) // 2], [False], False)
        record("flush", [window], [True], False)
    else:
        record("prefill", [0], [True], True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3.5-35b", "kimi-linear"], choices=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--state", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefill", nargs="*", type=int, default=[], help="tokens of a chunk, timed at batch 1 and 8")
    parser.add_argument("--split", type=int, help="slices of a head, instead of the launch's own choice")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    timer = Timer(options.repeats)
    bandwidth = timer.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.2f} TB/s")
    steps = [(tokens, batch) for tokens in options.tokens for batch in options.batch]
    steps += [(tokens, batch) for tokens in options.prefill for batch in (1, 8)]
    results = []
    for model in options.model:
        for state in options.state:
            for tokens, batch in steps:
                case = Case(model, batch, tokens, getattr(torch, state))
                results.append(measure(case, timer, bandwidth, options.split))
                shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in results[-1].items() if k != "times"}
                print(*(f"{k}={v}" for k, v in shown.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"copy_tb_s": bandwidth, "results": results}, indent=1))


if __name__ == "__main__":
    main()
