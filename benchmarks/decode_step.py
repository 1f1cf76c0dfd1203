"""Decode steps of a model of a published size with random weights: tokens/s by batch and mode, and where a step's time goes.

    python -m benchmarks.decode_step tests/data/configs/nemotron_3_nano_30b_a3b.json --batch 1 32 128 256 --json nano.json

Modes: ``standard`` rewrites the state at every token (window 1), ``replayssm`` once a window, ``speculative`` verifies drafts
and keeps a fixed number of tokens a step. Weights are made on the device. ``--profile`` adds the parts of a step and its
longest kernels; ``--layers`` takes only so many of the model's residual branches, for a quick look.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.bench.decode import Mode, decode_timings, modes, prepared_step, with_replay
from trtllm_replayssm.bench.machine import machine_info
from trtllm_replayssm.bench.profile import account, traced
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.synthetic import synthetic_checkpoint, synthetic_engine


def engine_of(options: argparse.Namespace) -> Engine:
    checkpoint = synthetic_checkpoint(options.config)
    if options.layers:
        decoder = replace(checkpoint.decoder, layers=checkpoint.decoder.layers[: options.layers], mtp=None)
        checkpoint = replace(checkpoint, decoder=decoder)
    size = BuildOptions(1, options.context_len + 1024, 4096, replay_window=options.window)
    return synthetic_engine(checkpoint, size, options.device)


def profiled(engine: Engine, mode: Mode, batch: int, context_len: int, steps: int, longest: int) -> dict[str, Any]:
    """Milliseconds of a step by part, and by its longest kernels."""
    session = Session(with_replay(engine, mode.replay, batch, mode.tokens))
    kernels = traced(session, prepared_step(session, mode, context_len, steps), steps)
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.start)
    total = {name: sum(found) / steps / 1e3 for name, found in times.items()}
    first = sorted(total, key=lambda name: -total[name])[:longest]
    return {
        "mode": mode.name,
        "batch": batch,
        "parts_ms": {part: value / steps / 1e3 for part, value in account(kernels).items()},
        "kernels": [{"name": n, "ms": total[n], "launches": len(times[n]) / steps} for n in first],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json of a model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--modes", nargs="+", default=["standard", "replayssm", "speculative"])
    parser.add_argument("--context_len", type=int, default=512, help="tokens that every request holds at first")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="BATCH")
    parser.add_argument("--kernels", type=int, default=25, help="kernels of a profile that are listed")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    engine = engine_of(options)
    weights = sum(weight.nbytes for weight in engine.weights.values())
    print(
        f"{engine.folder.name}: {weights / 1e9:.1f} GB of weights in {time.perf_counter() - started:.1f} s", flush=True
    )
    chosen = [mode for mode in modes(engine.config.replay) if mode.name in options.modes]
    timings, base = [], {}
    for timing in decode_timings(engine, options.batch, options.context_len, chosen, options.steps):
        timings.append(timing)
        rate = timing.tokens_per_second
        ratio = rate / base.setdefault(timing.batch_size, rate)
        mean = timing.step_ms.average
        print(
            f"batch {timing.batch_size:4} {timing.mode:12} {rate:10.1f} tokens/s {ratio:5.2f}x {mean:8.3f} ms",
            flush=True,
        )
    profiles = []
    for batch in options.profile:
        for mode in chosen:
            profiles.append(profiled(engine, mode, batch, options.context_len, 8, options.kernels))
            parts = profiles[-1]["parts_ms"]
            print(f"batch {batch} {mode.name}:", *(f"{part} {value:.3f}" for part, value in parts.items()), flush=True)
            for kernel in profiles[-1]["kernels"]:
                print(f"    {kernel['ms']:8.3f} ms {kernel['launches']:7.1f} x {kernel['name'][:90]}", flush=True)
    if options.json:
        report = {"model": engine.folder.name, "weights_bytes": weights, "machine": machine_info(engine.device)}
        report |= {"context_len": options.context_len, "timings": [t.to_dict() for t in timings], "profiles": profiles}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if engine.device.type == "cuda":
        print(
            f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {time.perf_counter() - started:.0f} s in all"
        )


if __name__ == "__main__":
    main()
