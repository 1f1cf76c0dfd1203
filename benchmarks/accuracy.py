"""What windows, 16-bit states, derived folds and quantised states cost in accuracy, on a text that the model has not seen.

    python -m benchmarks.accuracy --checkpoint_dir CHECKPOINT --output OUTPUT

CHECKPOINT is a folder written by ``trtllm-replayssm convert``; with ``--dtype float32`` nothing but the state differs between
variants. Every variant is fed the same tokens, one by one, through steps of a real session: a state is rewritten, rounded
and replayed as in decoding. It is a benchmark and no command of the program, because it judges the program's options, not an
engine of its user, and emulates formats that no engine has.

Writes OUTPUT/NAME.json and NAME.md after each variant, so that a run that is interrupted leaves what it found, and NAME.png at
the end; NAME is that of the checkpoint's folder. ``python -m benchmarks.accuracy_summary`` puts several into one table.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.accuracy_report import Report, Result
from benchmarks.accuracy_variants import Variant, variants
from trtllm_replayssm.bench.machine import machine_info
from trtllm_replayssm.bench.plots import check_matplotlib
from trtllm_replayssm.console import print_error
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tokenizer import Tokenizer

#: Segments of positions whose drift is shown apart.
SEGMENTS = 8
#: Positions whose logits are scored together: a step of a small model is short, and every launch between two counts.
SCORED = 256
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


@torch.no_grad()
def forced(session: Session, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Feed tokens ``[rows, n]`` one by one; information of the true next tokens, float32 bits ``[rows, n - 1]``, and the most
    probable ones, int64 ``[rows, n - 1]``, both on the session's device."""
    rows, length = tokens.shape
    keep, columns = [1] * rows, tokens.to(session.engine.device).T.contiguous()
    for slot in range(rows):
        session.admit(slot)
    bits, best = [], []
    for first in range(0, length - 1, SCORED):
        stop = min(first + SCORED, length - 1)
        logits = []
        for position in range(first, stop):
            logits.append(session.step(columns[position][:, None])[:, 0])
            session.commit(0, keep)
        scored, true = torch.stack(logits), columns[first + 1 : stop + 1, :, None].long()
        bits.append(-scored.log_softmax(-1).gather(-1, true)[..., 0] / math.log(2))
        best.append(scored.argmax(-1))
    return torch.cat(bits).T, torch.cat(best).T


def segments(positions: int) -> list[int]:
    """Bounds of up to SEGMENTS equal parts of ``positions``."""
    count = min(SEGMENTS, positions)
    return [positions * i // count for i in range(count + 1)]


class Comparison:
    """Runs variants over the same tokens; the first is the baseline."""

    def __init__(self, engine: Engine, tokens: Tensor, bytes_per_token: float) -> None:
        self.engine, self.tokens, self.bytes_per_token = engine, tokens, bytes_per_token
        self.segments = segments(tokens.shape[1] - 1)
        self.baseline: tuple[Tensor, Tensor] | None = None

    def result(self, variant: Variant) -> Result:
        start = time.perf_counter()
        session = Session(variant.engine(self.engine, len(self.tokens)))
        bits, best = (found.cpu() for found in forced(session, self.tokens))
        seconds = time.perf_counter() - start
        base_bits, base_best = self.baseline = self.baseline or (bits, best)
        parts = list(zip(self.segments, self.segments[1:]))
        per_byte = bits.double() / self.bytes_per_token
        drift = (bits.double() - base_bits.double()).abs()
        return Result(
            name=variant.name,
            emulated=variant.emulated is not None,
            bits_per_byte=per_byte.mean().item(),
            by_position=[per_byte[:, first:last].mean().item() for first, last in parts],
            agreement=(best == base_best).double().mean().item(),
            drift=[drift[:, first:last].mean().item() for first, last in parts],
            rewrites=session.rewrites,
            seconds=seconds,
        )


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None


def run(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    for name in ("context_len", "rows"):
        if getattr(options, name) < (least := 2 if name == "context_len" else 1):
            raise UserError(f"{name} is {getattr(options, name)}; it must be {least} or more")
    check_matplotlib()
    tokens, bytes_per_token = pieces(
        Tokenizer(options.checkpoint_dir), read_text(options.text), options.rows, options.context_len
    )
    with tempfile.TemporaryDirectory() as folder:
        size = BuildOptions(
            options.rows, options.context_len, max(8192, options.rows), replay_window=1, max_draft_len=0
        )
        build_engine(options.checkpoint_dir, Path(folder) / "engine", size)
        engine = Engine.load(Path(folder) / "engine", device=options.device, plugin_impl=options.plugin_impl)
        compare(options, engine, tokens, bytes_per_token, start)


def compare(options: argparse.Namespace, engine: Engine, tokens: Tensor, bytes_per_token: float, start: float) -> None:
    """Measure all variants, and write what is found after each. start: of the run, by time.perf_counter.

    Raises UserError when the report cannot be written, or a variant failed.
    """
    comparison = Comparison(engine, tokens, bytes_per_token)
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
    baseline, *others = variants(engine, options.windows)
    chosen = dict.fromkeys(variant for word in options.only or [""] for variant in others if word in variant.name)
    for variant in (baseline, *chosen):
        longest = max((result.seconds for result in report.results), default=0.0)
        if time.perf_counter() - start + longest > options.seconds:
            report.left_out.append(variant.name)
        elif not measured(comparison, variant, report) and not report.results:
            break
        report.write(options.output)
    print(*report.write(options.output), *report.plot(options.output), sep="\n")
    if report.failed:
        raise UserError(f"{len(report.failed)} of {1 + len(chosen)} variants failed: {', '.join(report.failed)}")


def measured(comparison: Comparison, variant: Variant, report: Report) -> bool:
    """Whether the variant ran. One that fails, on a machine that cannot run it, must not end a long run."""
    try:
        result = comparison.result(variant)
    except (UserError, RuntimeError) as error:
        report.failed[variant.name] = str(error).partition("\n")[0]
        print(f"{variant.name} failed: {error}", file=sys.stderr, flush=True)
        return False
    report.results.append(result)
    print(
        f"{result.name}: {result.bits_per_byte:.5f} bits a byte, same next token {result.agreement:.3%},"
        f" {result.seconds:.1f} s",
        flush=True,
    )
    return True


def main() -> int:
    try:
        run(parse(sys.argv[1:]))
    except UserError as error:
        print_error(error.message, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
