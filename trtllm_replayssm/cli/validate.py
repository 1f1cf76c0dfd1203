"""Builds tiny engines of every family on this machine and checks them: against the embedded engine and transformers, with
rejected drafts, preemption, CUDA graphs and engines of other versions; ends with times of steps.

Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import path_argument
from trtllm_replayssm.console import LOGGER, print_table

if TYPE_CHECKING:
    from trtllm_replayssm.validation.report import Report, Result

#: As in validation.catalogue and validation.checks, which take long to import.
FAMILY_CHOICES = (
    *("nemotron_h", "qwen3_next", "kimi_linear", "mamba2", "qwen3_5", "bailing_hybrid", "state_spaces", "granite"),
    *("falcon_h1", "bamba", "olmo_hybrid", "lara_mini", "qwen4_exp", "glm5_next", "kimi_k3"),
)
CHECK_CHOICES = (
    *("transformers", "embedded", "generate", "chunks", "rollback"),
    *("resume", "copies", "graphs", "aliases", "versions", "benchmark"),
)
WORDS = {"passed": "passed", "failed": "FAILED", "skipped": "skipped"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine_flavour",
        choices=("auto", "tensorrt", "embedded"),
        default="auto",
        help="what is checked; auto is tensorrt where TensorRT and a GPU are present",
    )
    parser.add_argument("--family", nargs="+", choices=FAMILY_CHOICES, help="families to check; all by default")
    parser.add_argument("--check", nargs="+", choices=CHECK_CHOICES, help="checks to run; all by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the models")
    parser.add_argument("--steps", type=int, default=48, help="decode steps of every run, 20 to 200")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--output_file", type=path_argument, help="JSON file for the report")
    parser.add_argument("--output_dir", type=path_argument, help="keep checkpoints and engines there, in a new folder")


def run(args: argparse.Namespace) -> int:
    import torch

    from trtllm_replayssm.errors import UserError
    from trtllm_replayssm.runtime.files import check_writable, output_file
    from trtllm_replayssm.validation.report import validate
    from trtllm_replayssm.validation.subject import Settings

    if not 20 <= args.steps <= 200:
        raise UserError(f"--steps is {args.steps}; it must be 20 to 200, more than a window and less than a cache")
    if args.output_file is not None:
        check_writable(args.output_file)
    if args.output_dir is not None and args.output_dir.is_dir() and any(args.output_dir.iterdir()):
        raise UserError(f"{args.output_dir} is not empty", "give a new folder")
    # The models are too small to be worth dividing over threads.
    torch.set_num_threads(1)
    settings = Settings(args.engine_flavour, args.dtype, args.steps, args.device)
    families, checks = args.family or FAMILY_CHOICES, args.check or CHECK_CHOICES
    with tempfile.TemporaryDirectory() if args.output_dir is None else nullcontext(args.output_dir) as folder:
        report = validate(families, settings, Path(folder), checks, tell)
    print_report(report)
    if args.output_file is not None:
        with output_file(args.output_file) as file:
            file.write(json.dumps(report.to_dict(), indent=2).encode() + b"\n")
    if report.failed:
        LOGGER.error("%d of %d claims failed", len(report.failed), len(report.results))
    return 1 if report.failed else 0


def tell(result: Result) -> None:
    LOGGER.info("%s: %s %s: %s", result.family, WORDS[result.status], result.claim, result.measured)


def print_report(report: Report) -> None:
    machine = [(finding.name, finding.value) for finding in report.machine]
    print_table("machine", ("", ""), machine)
    rows = [(WORDS[r.status], r.family, r.claim, r.measured) for r in report.results]
    title = f"engine flavour {report.flavour or 'none'} on {report.where or 'nothing'}, {report.seconds:.0f} s"
    print_table(title, ("", "family", "claim", "measured in this run"), rows)
