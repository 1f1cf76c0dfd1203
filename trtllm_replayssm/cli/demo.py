"""Takes a small model through convert, build and generate, compares it with transformers, and proves each step.

The model is a trained one where this is a checkout, which has them as test data; otherwise transformers makes a tiny one with
random weights. Exits with 1 when a proof fails.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import path_argument
from trtllm_replayssm.console import LOGGER, print_line, print_table
from trtllm_replayssm.demo.catalogue import MODELS, TRAINED

if TYPE_CHECKING:
    from trtllm_replayssm.demo.subject import Subject

USUAL_MODEL, USUAL_FAMILY = next(iter(TRAINED)), next(iter(MODELS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--trained_model", choices=TRAINED, help=f"trained model, one for each recurrence; by default {USUAL_MODEL}"
    )
    which.add_argument("--family", choices=MODELS, help="model to make with random weights instead")
    parser.add_argument("--output_dir", type=path_argument, help="keep model, checkpoint and engines there")


def run(args: argparse.Namespace) -> int:
    import torch

    from trtllm_replayssm.demo.proofs import run_demo

    # The model is too small to be worth dividing over threads.
    torch.set_num_threads(1)
    subject = chosen(args.trained_model, args.family)
    with tempfile.TemporaryDirectory() if args.output_dir is None else nullcontext(args.output_dir) as folder:
        report = run_demo(subject, Path(folder))
    if report.text:
        print_line(
            f"a prompt of {len(subject.prompts[0])} characters, and what {subject.name} makes of it:\n\n{report.text}\n"
        )
    rows = [("proved" if proof.holds else "FAILED", proof.claim, proof.measured) for proof in report.proofs]
    print_table(
        f"{subject.name} on {report.where}, {report.seconds:.0f} s", ("", "claim", "measured in this run"), rows
    )
    if args.output_dir is not None:
        print_line(f"checkpoint and engines are in {args.output_dir}")
    failed = sum(not proof.holds for proof in report.proofs)
    if failed:
        LOGGER.error("%d of %d proofs failed", failed, len(report.proofs))
    return 1 if failed else 0


def chosen(trained: str | None, family: str | None) -> Subject:
    """The model that the options mean. Raises UserError for a trained one that is not there."""
    from trtllm_replayssm.demo.subject import has_trained, random_subject, trained_subject

    if family is not None:
        return random_subject(family)
    if trained is not None or has_trained(USUAL_MODEL):
        return trained_subject(trained or USUAL_MODEL)
    LOGGER.info("no trained model comes with this installation: %s gets random weights", USUAL_FAMILY)
    return random_subject(USUAL_FAMILY)
