"""Finds the window, state dtype and read dtype that suit a model's recurrent layers on the GPU at hand.

Times the kernels of the recurrent layers alone, for every candidate, in steps of the batch and draft length that are asked for;
measures the error of each over a long request; weighs speed, memory and error; and writes the choice for build --tuned.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.cli.options import FLOAT_DTYPES, Count, path_argument
from trtllm_replayssm.console import LOGGER, bytes_text, print_line, print_table
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import FLOAT_STATES, QUANTISED_STATES

if TYPE_CHECKING:
    from trtllm_replayssm.tuning.measure import Row, Setting, Tuner
    from trtllm_replayssm.tuning.subject import TunedSubject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine_dir", type=path_argument, help="folder written by build")
    source.add_argument("--checkpoint_dir", type=path_argument, help="folder written by convert")
    source.add_argument(
        "--synthetic_config", type=path_argument, help="config.json of a model; only the shapes of its layers matter"
    )
    synthetic = parser.add_argument_group("model of a --synthetic_config", "As for convert.")
    synthetic.add_argument("--dtype", choices=FLOAT_DTYPES, help="of activations; by default bfloat16")
    synthetic.add_argument("--tp_size", action=Count, help="ranks; by default 1. What one rank does is timed")
    target = parser.add_argument_group("what to tune for")
    target.add_argument(
        "--batch_size", action=Count, help="requests of a step; by default the engine's max_batch_size, or 8"
    )
    target.add_argument(
        "--draft_len", action=Count, least=0, help="drafts of a request in a step; by default what the model stores"
    )
    chosen = parser.add_argument_group("candidates")
    chosen.add_argument("--windows", action=Count, nargs="+", metavar="N", help="by default 4 8 12 16 24 32 64")
    chosen.add_argument(
        "--state_dtypes", nargs="+", choices=FLOAT_STATES + QUANTISED_STATES, help="by default all of floating point"
    )
    chosen.add_argument("--read_dtypes", nargs="+", choices=("same", "fp8", "nvfp4"), help="by default all")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max_error",
        type=float,
        help="largest relative error of the outputs; by default twice that of the most exact candidate",
    )
    limits.add_argument("--max_slot_bytes", type=int, help="most bytes of a request in all recurrent layers of a rank")
    parser.add_argument(
        "--error_tokens", action=Count, default=4096, help="tokens of the request over which errors are measured"
    )
    parser.add_argument("--repeats", action=Count, default=7, help="replays of which a time is the median")
    parser.add_argument("--output", type=path_argument, help="JSON file to write, for build --tuned")
    parser.add_argument("--dry_run", action="store_true", help="list the candidates and their memory; needs no GPU")
    parser.add_argument("--device", help="cuda or cuda:N; by default this machine's GPU")


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.runtime.files import check_writable
    from trtllm_replayssm.tuning.candidate import READ_DTYPES, WINDOWS, candidates
    from trtllm_replayssm.tuning.measure import rows

    check_options(args)
    if args.output is not None:
        check_writable(args.output)
    subject, setting = subject_and_setting(args)
    listed = candidates(args.windows or WINDOWS, args.state_dtypes or FLOAT_STATES, args.read_dtypes or READ_DTYPES)
    found = rows(subject, setting, listed)
    if args.dry_run:
        print_candidates(subject, found, args.max_slot_bytes)
        return 0
    return tune(args, subject, setting, found)


def check_options(args: argparse.Namespace) -> None:
    """Raises UserError for values that make no sense, and options that would do nothing."""
    for name in ("max_slot_bytes", "max_error"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} is {value}; it must be more than 0")
    if args.synthetic_config is None and (args.dtype, args.tp_size) != (None, None):
        name = "dtype" if args.dtype is not None else "tp_size"
        raise UserError(f"--{name} describes a --synthetic_config", "engines and checkpoints have their own")
    if args.dry_run and args.output is not None:
        raise UserError("--dry_run chooses nothing that --output could hold", "leave one of them out")


def subject_and_setting(args: argparse.Namespace) -> tuple[TunedSubject, Setting]:
    """What is tuned, and for which steps. Raises UserError or one of its kinds when there is no such model."""
    from trtllm_replayssm.runtime.engine_config import BuildOptions
    from trtllm_replayssm.runtime.synthetic import synthetic_checkpoint
    from trtllm_replayssm.tuning.measure import Setting
    from trtllm_replayssm.tuning.subject import TunedSubject, checkpoint_subject, engine_subject

    batch = BuildOptions().max_batch_size
    if args.engine_dir is not None:
        subject, config = engine_subject(args.engine_dir)
        batch = config.max_batch_size
    elif args.checkpoint_dir is not None:
        subject = checkpoint_subject(args.checkpoint_dir)
    else:
        subject = TunedSubject(synthetic_checkpoint(args.synthetic_config, args.dtype or "bfloat16", args.tp_size or 1))
    stored = subject.checkpoint.replay.max_draft_len
    drafts = stored if args.draft_len is None else args.draft_len
    return subject, Setting(args.batch_size or batch, drafts, args.error_tokens)


def print_candidates(subject: TunedSubject, found: Sequence[Row], max_slot_bytes: int | None) -> None:
    columns = ("window", "state", "read", "checkpoint", "copy", "ring", "a request", "note")
    print_table(title(subject), columns, [(*described(row), note(row, max_slot_bytes)) for row in found])


def note(row: Row, max_slot_bytes: int | None) -> str:
    """Why a candidate would not be chosen, as far as that needs no measurement."""
    too_large = row.bytes is not None and max_slot_bytes is not None and row.bytes.total > max_slot_bytes
    return row.refused or ("more than --max_slot_bytes" if too_large else "")


def title(subject: TunedSubject) -> str:
    layers = ", ".join(f"{group.count} x {group.layer.kind}" for group in subject.groups())
    return f"{subject.checkpoint.hf_architecture}, recurrent layers of one rank: {layers}"


def described(row: Row) -> tuple[str, ...]:
    """Cells that need no measurement."""
    candidate, size = row.candidate, row.bytes
    sizes = ("",) * 4 if size is None else map(bytes_text, (size.checkpoint, size.copy, size.ring, size.total))
    return str(candidate.window), candidate.state_dtype, candidate.read_dtype, *sizes


def tune(args: argparse.Namespace, subject: TunedSubject, setting: Setting, found: Sequence[Row]) -> int:
    """Measure, print, choose, and write what was chosen."""
    from trtllm_replayssm.tuning.choice import chosen, explained, limits
    from trtllm_replayssm.tuning.tuned import write_tuned

    measured, machine = measured_here(args, subject, setting, found)
    print_rows(subject, setting, measured, machine["name"])
    within = limits(measured, args.max_error, args.max_slot_bytes)
    taken = chosen(measured, within)
    for line in explained(measured, within, taken, args.max_error is not None):
        print_line(line)
    if args.output is not None:
        write_tuned(args.output, subject.checkpoint, setting, measured, within, taken, machine)
        LOGGER.info("written: %s, for build --tuned", args.output)
    return 0


def measured_here(
    args: argparse.Namespace, subject: TunedSubject, setting: Setting, found: Sequence[Row]
) -> tuple[list[Row], dict[str, Any]]:
    """The rows, measured on this machine's GPU, and what the machine is. Raises UserError without one."""
    from trtllm_replayssm.bench.machine import machine_info
    from trtllm_replayssm.plugins.implementation import implementation
    from trtllm_replayssm.runtime.devices import made_current, resolve_device
    from trtllm_replayssm.tuning.measure import Tuner
    from trtllm_replayssm.tuning.timing import Timer

    device = resolve_device(args.device)
    if device.type != "cuda":
        raise UserError(
            "tune times CUDA kernels, and there is no CUDA GPU here", "--dry_run lists the candidates on any machine"
        )
    with made_current(device):
        tuner = Tuner(subject, setting, Timer(args.repeats), implementation("cuda", device), device)
        return measure_all(tuner, found), machine_info(device)


def measure_all(tuner: Tuner, found: Sequence[Row]) -> list[Row]:
    """The rows with times and errors, those that are refused as they are. Raises UserError when memory does not suffice."""
    import torch

    LOGGER.info("compiling the kernels of %d candidates", sum(row.refused is None for row in found))
    measured: list[Row] = []
    try:
        for row in tuner.compiled(found, os.cpu_count() or 1):
            measured.append(row if row.refused is not None else tuner.measured(row))
            LOGGER.info("%d of %d: %s%s", len(measured), len(found), row.candidate, progress(measured[-1]))
    except torch.OutOfMemoryError:
        raise UserError(
            f"the GPU has not enough memory for steps of {tuner.setting.batch} requests", "lower --batch_size"
        ) from None
    return measured


def progress(row: Row) -> str:
    if row.times is None or row.drift is None:
        return f": {row.refused}"
    return f": {row.times.mean:.1f} us, error {row.drift.last:.1e}"


def print_rows(subject: TunedSubject, setting: Setting, measured: Sequence[Row], gpu: str) -> None:
    from trtllm_replayssm.tuning.choice import pareto
    from trtllm_replayssm.tuning.drift import WEAK_DECAY

    best, rows = pareto(measured), []
    for i, row in enumerate(measured):
        times = ("",) * 3 if row.times is None else (f"{value:.1f}" for value in vars(row.times).values())
        errors = ("",) * 3 if row.drift is None else (f"{value:.1e}" for value in vars(row.drift).values())
        rows.append((*described(row), *times, *errors, "*" if i in best else row.refused or ""))
    columns = ("window", "state", "read", "checkpoint", "copy", "ring", "a request")
    measures = ("us", "fold", "mixed", "error", "at first", "of state", "")
    print_line(f"{title(subject)}; {setting.batch} requests, {setting.draft_len} drafts, {gpu}")
    print_line("us: of a step in all these layers, as a mean over the steps from one fold of the ring to the next;")
    print_line("fold: of the step that folds; mixed: of requests spread over these steps, as in a running server")
    decays = "the model's own" if subject.weights is not None else f"synthetic, {WEAK_DECAY:g} a token in the exponent"
    print_line(
        f"error: of the outputs, relative to float64, over the last quarter of {setting.error_tokens} tokens; at first: over "
        f"the first; decays: {decays}"
    )
    print_table("*: no other is as good in mixed, memory and error, and better in one", (*columns, *measures), rows)
