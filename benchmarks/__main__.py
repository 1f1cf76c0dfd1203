"""Times the CUDA kernels of the recurrent layers beside those of other projects, in one run.

    python -m benchmarks fetch                      # once, where there is a network: the peers' kernels, into .peers
    python -m benchmarks compile-fla                # once: what fla's prefill compiles at first use, in several processes
    python -m benchmarks mamba2 --batch 1 64 256    # also gated_delta, kda, or all
    python -m benchmarks conv                       # the convolution before a step, and both together
    python -m benchmarks plot RESULT.json

Every implementation is first checked against the float64 recurrence. Times are medians of CUDA-graph replays with a cold L2
cache. A replay kernel is timed at every position of its cursor, folds included, and shown as their mean. A peer that cannot
be had is listed with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.cases import MODELS, Case
from trtllm_replayssm.errors import UserError

STATES = ("float32", "bfloat16", "float16")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for kind in (*MODELS, "all"):
        chosen = list(MODELS) if kind == "all" else [kind]
        command = commands.add_parser(kind, help=f"time {kind}", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=run_kinds, kinds=chosen)
        models = [model for k in chosen for model in MODELS[k]]
        command.add_argument("--model", nargs="+", choices=models, default=[m for m in models if "-tp" not in m])
        add_run_arguments(command)
    conv = commands.add_parser("conv", help="time the convolution, the step behind it, and both together")
    conv.set_defaults(run=run_conv)
    conv.add_argument("--repeats", type=int, default=15)
    fetch = commands.add_parser("fetch", help="bring the peers' kernels from PyPI")
    fetch.set_defaults(run=run_fetch)
    fetch.add_argument("--peers", type=Path, default=Path(".peers"), help="folder to fill")
    fetch.add_argument("--only", nargs="+", metavar="NAME", help="packages, instead of all")
    prebuild = commands.add_parser("prebuild", help="compile FlashInfer's kernels, without a GPU")
    prebuild.set_defaults(run=run_prebuild)
    prebuild.add_argument("--peers", type=Path, default=Path(".peers"))
    prebuild.add_argument("--tokens", nargs="+", type=int, default=[1, 4])
    prebuild.add_argument("--state", nargs="+", default=["float32", "bfloat16"], choices=STATES)
    ahead = commands.add_parser("compile-fla", help="compile the Triton kernels of fla's prefill in several processes")
    ahead.set_defaults(run=run_compile_fla)
    ahead.add_argument(
        "--model", nargs="+", choices=[*MODELS["gated_delta"], *MODELS["kda"]], default=["qwen3.5-35b", "kimi-linear"]
    )
    ahead.add_argument("--tokens", type=int, default=2048)
    ahead.add_argument("--processes", type=int, help="of these; as many as there are cores, 16 at most, if not given")
    ahead.add_argument("--peers", type=Path, default=Path(".peers"))
    plot = commands.add_parser("plot", help="draw the pictures of a result again")
    plot.set_defaults(run=run_plot)
    plot.add_argument("result", type=Path)
    return parser.parse_args(arguments)


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 512, 1024])
    command.add_argument("--state", nargs="+", default=["float32", "bfloat16"], choices=STATES)
    command.add_argument(
        "--tokens", nargs="*", type=int, default=[1, 2, 4, 8], help="tokens of a decode or verify step"
    )
    command.add_argument("--verify_batch", nargs="+", type=int, help="batches of steps of several tokens, if others")
    command.add_argument("--prefill", nargs="*", type=int, default=[2048], help="tokens of a prefill")
    command.add_argument("--prefill_batch", nargs="+", type=int, default=[1, 8], help="batches of a prefill")
    command.add_argument("--peers", type=Path, default=Path(".peers"), help="folder that `fetch` filled")
    command.add_argument("--only", nargs="+", metavar="NAME", help="implementations, instead of all")
    command.add_argument("--check", action="store_true", help="check the implementations and time nothing")
    command.add_argument("--repeats", type=int, default=15, help="replays of which the median is taken")
    command.add_argument("--output", type=Path, default=Path("build/benchmarks"), help="folder for JSON and PNG")


def run_kinds(options: argparse.Namespace) -> None:
    from benchmarks import plots, report
    from benchmarks.measure import measure
    from benchmarks.ours import Fp8Reads, Nvfp4Reads, Replay, Standard
    from benchmarks.peers import delta_rule, flashinfer_gdn, loader, mamba2
    from benchmarks.subject import Subject
    from trtllm_replayssm.tuning.timing import Timer

    require_gpu()
    loader.use_folder(options.peers)
    loader.tune_quickly()
    bandwidth = Timer(options.repeats).copy_bandwidth()
    timer = None if options.check else Timer(options.repeats)
    run = report.Run(report.environment(), bandwidth)
    print(f"{run.environment['gpu']}: copy {run.copy_tb_s:.2f} TB/s", flush=True)
    for case in cases(options):
        subjects: dict[str, type[Subject]] = {report.OURS: Replay, report.STANDARD: Standard}
        subjects |= {report.READS["fp8"]: Fp8Reads, report.READS["nvfp4"]: Nvfp4Reads}
        subjects.update(mamba2.PEERS if case.kind == "mamba2" else {**delta_rule.PEERS, **flashinfer_gdn.PEERS})
        chosen = {name: subject for name, subject in subjects.items() if not options.only or name in options.only}
        for result in measure(case, chosen, timer, run.copy_tb_s):
            run.results.append(result)
            print(report.line(result), flush=True)
    if options.check:
        return
    run.write(options.output / "results.json")
    text = report.tables(run.results)
    (options.output / "tables.md").write_text(text + "\n")
    print(f"\n{text}\n")
    for path in plots.plot(run, options.output):
        print(path)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    import torch

    for kind in options.kinds:
        models = [model for model in MODELS[kind] if model in options.model]
        for model, state in product(models, options.state):
            for tokens in options.tokens:
                for batch in options.verify_batch if options.verify_batch and tokens > 1 else options.batch:
                    yield Case(kind, model, batch, tokens, getattr(torch, state))
            for tokens, batch in product(options.prefill, options.prefill_batch):
                yield Case(kind, model, batch, tokens, getattr(torch, state))


def run_conv(options: argparse.Namespace) -> None:
    from benchmarks.conv import compare
    from trtllm_replayssm.tuning.timing import Timer

    require_gpu()
    for line in compare(Timer(options.repeats)):
        print(line, flush=True)


def run_fetch(options: argparse.Namespace) -> None:
    from benchmarks.peers.fetch import PACKAGES, fetch

    names = options.only or list(PACKAGES)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        raise UserError(f"there is no peer {unknown[0]!r}", f"there are {', '.join(PACKAGES)}")
    for line in fetch(options.peers, names):
        print(line, flush=True)


def run_prebuild(options: argparse.Namespace) -> None:
    from benchmarks.peers.prebuild_flashinfer import prebuild

    for line in prebuild(options.peers, options.tokens, options.state):
        print(line, flush=True)


def run_compile_fla(options: argparse.Namespace) -> None:
    import torch

    from benchmarks.peers.compile_fla import compile_fla

    require_gpu()
    kinds = [(kind, model) for kind in ("gated_delta", "kda") for model in MODELS[kind] if model in options.model]
    chosen = [Case(kind, model, 1, options.tokens, torch.float32) for kind, model in kinds]
    for line in compile_fla(options.peers, chosen, options.processes):
        print(line, flush=True)


def run_plot(options: argparse.Namespace) -> None:
    from benchmarks import plots, report

    for path in plots.plot(report.Run.read(options.result), options.result.parent):
        print(path)


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("a benchmark needs a CUDA GPU")


def main() -> int:
    options = parse(sys.argv[1:])
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
