"""What windows, 16-bit states, derived folds and quantised states cost in accuracy, on a text that the model has not seen.

    python -m benchmarks.accuracy --checkpoint_dir CHECKPOINT --output OUTPUT

CHECKPOINT is a folder written by ``trtllm-replayssm convert``; with ``--dtype float32`` nothing but the state differs between
variants. Every variant is fed the same tokens, one by one, through steps of a real session: a state is rewritten, rounded
and replayed as in decoding. On a GPU several variants run side by side (benchmarks/accuracy_runs.py). It is a benchmark and no
command of the program, because it judges the program's options, not an engine of its user, and emulates formats that no engine
has.

Writes OUTPUT/NAME.json and NAME.md after each variant, so that a run that is interrupted leaves what it found, and NAME.png at
the end; NAME is that of the checkpoint's folder. ``python -m benchmarks.accuracy_summary`` puts several into one table.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.accuracy_report import Report, Result
from benchmarks.accuracy_runs import Forced, compile_kernels, feed_all, prepared
from benchmarks.accuracy_variants import Variant, chosen
from trtllm_replayssm.bench.machine import machine_info
from trtllm_replayssm.bench.plots import check_matplotlib
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.console import print_error
from trtllm_replayssm.errors import UserError, not_utf8
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tokenizer import Tokenizer

#: Segments of positions whose drift is shown apart.
SEGMENTS = 8
#: The held-out text that comes with the checkout.
TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "trained" / "held_out.txt"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint_dir", type=Path, required=True, help="folder written by convert, with a tokenizer"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="held-out text, UTF-8; by default tests/data/trained's")
    parser.add_argument("--output", type=Path, required=True, help="folder for JSON, Markdown and PNG")
    parser.add_argument("--context_len", type=int, default=16384, help="tokens of each piece of the text")
    parser.add_argument("--rows", type=int, default=8, help="pieces of the text, all in one batch")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="variants whose name has one of these words, in their order"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no variant that would not end so long after the start"
    )
    parser.add_argument("--parallel", type=int, default=16, help="variants that run side by side on a GPU")
    parser.add_argument("--device", help="cuda or cpu; by default the GPU where there is one")
    parser.add_argument("--plugin_impl", default="auto", choices=("auto", "reference", "cuda"))
    return parser.parse_args(arguments)


def pieces(tokenizer: Tokenizer, text: str, rows: int, length: int) -> tuple[Tensor, float]:
    """The first ``rows * length`` tokens, int32 ``[rows, length]``, and the bytes of a token on average.

    Raises UserError for a text that is shorter.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < rows * length:
        raise UserError(
            f"the text has {len(ids)} tokens, fewer than {rows} pieces of {length}", "lower --rows or --context_len"
        )
    return torch.tensor(ids[: rows * length], dtype=torch.int32).view(rows, length), len(text.encode()) / len(ids)


def segments(positions: int) -> list[int]:
    """Bounds of up to SEGMENTS equal parts of ``positions``."""
    count = min(SEGMENTS, positions)
    return [positions * i // count for i in range(count + 1)]


class Comparison:
    """Runs variants over the same tokens; the first is the baseline. parallel: how many run side by side, on a GPU."""

    def __init__(self, engine: Engine, tokens: Tensor, bytes_per_token: float, parallel: int = 1) -> None:
        self.engine, self.tokens, self.bytes_per_token = engine, tokens, bytes_per_token
        self.segments = segments(tokens.shape[1] - 1)
        on_gpu = engine.device.type == "cuda"
        #: One for each place in a group. They stay: libraries keep a workspace for every stream that they have seen.
        self.streams = [torch.cuda.Stream(engine.device) for _ in range(parallel)] if on_gpu else [None]
        self.baseline: Forced | None = None

    def results(self, group: Sequence[Variant]) -> dict[Variant, Result | Exception]:
        """What the variants do, as many as there are streams, side by side; an error of one that this machine cannot run.

        Without a baseline the others mean nothing, and are not run.
        """
        start, runs = time.perf_counter(), {}
        outcomes: dict[Variant, Result | Exception] = {}
        for variant, stream in zip(group, self.streams):
            try:
                session = Session(variant.engine(self.engine, len(self.tokens)))
                runs[variant] = prepared(session, self.tokens, stream)
            except (UserError, RuntimeError) as error:
                outcomes[variant] = error
        if self.baseline is None and group[0] in outcomes:
            return outcomes
        try:
            feed_all(list(runs.values()))
            found = {variant: run.found() for variant, run in runs.items()}
        except (UserError, RuntimeError) as error:
            return outcomes | dict.fromkeys(runs, error)
        seconds = time.perf_counter() - start
        return outcomes | {variant: self.judged(variant, forced, seconds) for variant, forced in found.items()}

    def judged(self, variant: Variant, found: Forced, seconds: float) -> Result:
        base = self.baseline = self.baseline or found
        parts = list(zip(self.segments, self.segments[1:]))
        per_byte = found.bits.double() / self.bytes_per_token
        drift = (found.bits.double() - base.bits.double()).abs()
        return Result(
            name=variant.name,
            emulated=variant.emulated is not None,
            bits_per_byte=per_byte.mean().item(),
            by_position=[per_byte[:, first:last].mean().item() for first, last in parts],
            agreement=(found.best == base.best).double().mean().item(),
            drift=[drift[:, first:last].mean().item() for first, last in parts],
            rewrites=found.rewrites,
            seconds=seconds,
        )


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise not_utf8(str(path), error) from None


def run(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    for name in ("context_len", "rows", "parallel"):
        if getattr(options, name) < (least := 2 if name == "context_len" else 1):
            raise UserError(f"{name} is {getattr(options, name)}; it must be {least} or more")
    check_matplotlib()
    listed = chosen(CheckpointConfig.read(options.checkpoint_dir), options.windows, options.only or ())
    tokens, bytes_per_token = pieces(
        Tokenizer(options.checkpoint_dir), read_text(options.text), options.rows, options.context_len
    )
    with tempfile.TemporaryDirectory() as folder:
        size = BuildOptions(
            options.rows, options.context_len, max(8192, options.rows), replay_window=1, max_draft_len=0
        )
        build_engine(options.checkpoint_dir, Path(folder) / "engine", size)
        engine = Engine.load(Path(folder) / "engine", device=options.device, plugin_impl=options.plugin_impl)
        compare(options, engine, listed, tokens, bytes_per_token, start)


def compare(
    options: argparse.Namespace,
    engine: Engine,
    listed: Sequence[Variant],
    tokens: Tensor,
    bytes_per_token: float,
    start: float,
) -> None:
    """Measure the listed variants, and write what is found after each. start: of the run, by time.perf_counter.

    Raises UserError when the report cannot be written, or a variant failed.
    """
    comparison = Comparison(engine, tokens, bytes_per_token, options.parallel)
    about = {
        "command": ["python", "-m", "benchmarks.accuracy", *sys.argv[1:]],
        "machine": machine_info(engine.device),
        "dtype": engine.config.checkpoint.dtype,
        "plugins": engine.plugins.name,
        "rows": options.rows,
        "context_len": options.context_len,
        "bytes_per_token": bytes_per_token,
        "text": options.text.name,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    report = Report(options.checkpoint_dir.resolve().name, about, comparison.segments)
    size = len(comparison.streams)
    if engine.plugins.name == "cuda":
        compile_kernels([variant.engine(engine, options.rows) for variant in listed])
    for group in (listed[first : first + size] for first in range(0, len(listed), size)):
        longest = max((result.seconds for result in report.results), default=0.0)
        if time.perf_counter() - start + longest > options.seconds:
            report.left_out += [variant.name for variant in group]
        elif not measured(comparison, group, report):
            break
        report.write(options.output)
    print(*report.write(options.output), *report.plot(options.output), sep="\n")
    if report.failed:
        raise UserError(f"{len(report.failed)} of {len(listed)} variants failed: {', '.join(report.failed)}")


def measured(comparison: Comparison, group: Sequence[Variant], report: Report) -> bool:
    """Put what a group does into the report; whether there is a baseline. A variant that fails must not end a long run."""
    for variant, outcome in comparison.results(group).items():
        if isinstance(outcome, Exception):
            report.failed[variant.name] = str(outcome).partition("\n")[0]
            print(f"{variant.name} failed: {outcome}", file=sys.stderr, flush=True)
            continue
        report.results.append(outcome)
        print(
            f"{outcome.name}: {outcome.bits_per_byte:.5f} bits a byte, same next token {outcome.agreement:.3%},"
            f" {outcome.seconds:.1f} s",
            flush=True,
        )
    return comparison.baseline is not None


def main() -> int:
    # Hardware queues of a GPU; streams that share one wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        run(parse(sys.argv[1:]))
    except UserError as error:
        print_error(error.message, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
