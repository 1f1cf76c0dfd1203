"""Takes a tiny random model from transformers through convert, build and generate, and proves each step.

Exits with 1 when a proof fails.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

from trtllm_replayssm.cli.options import path_argument
from trtllm_replayssm.console import LOGGER, print_line, print_table
from trtllm_replayssm.demo.catalogue import MODELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", choices=MODELS, default=next(iter(MODELS)), help="model to make, one for each recurrence"
    )
    parser.add_argument("--output_dir", type=path_argument, help="keep model, checkpoint and engines there")


def run(args: argparse.Namespace) -> int:
    import torch

    from trtllm_replayssm.demo.proofs import run_demo

    # The model is too small to be worth dividing over threads.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() if args.output_dir is None else nullcontext(args.output_dir) as folder:
        report = run_demo(args.family, Path(folder))
    rows = [("proved" if proof.holds else "FAILED", proof.claim, proof.measured) for proof in report.proofs]
    print_table(f"{args.family} on {report.where}, {report.seconds:.0f} s", ("", "claim", "measured in this run"), rows)
    if args.output_dir is not None:
        print_line(f"model, checkpoint and engines are in {args.output_dir}")
    failed = sum(not proof.holds for proof in report.proofs)
    if failed:
        LOGGER.error("%d of %d proofs failed", failed, len(report.proofs))
    return 1 if failed else 0
