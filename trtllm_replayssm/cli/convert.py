"""Makes a TensorRT-LLM checkpoint (config.json and one rank{N}.safetensors per rank) from a Hugging Face folder."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import FLOAT_DTYPES, Count, add_replay_arguments, path_argument, replay_config
from trtllm_replayssm.console import LOGGER, byte_progress, bytes_text, print_table
from trtllm_replayssm.errors import UserError

if TYPE_CHECKING:
    from trtllm_replayssm.inspection import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model_dir", type=path_argument, required=True, help="Hugging Face folder: config.json, *.safetensors"
    )
    parser.add_argument(
        "--output_dir",
        type=path_argument,
        required=True,
        help="folder to write; an earlier checkpoint in it is replaced",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *FLOAT_DTYPES),
        default="auto",
        help="dtype of activations and of weights that need not stay in float32; auto is the model's own",
    )
    parser.add_argument(
        "--quantization",
        choices=("dequantise", "keep"),
        default="dequantise",
        help="what becomes of quantised weights; keep: FP8 and NVFP4 weights of linear layers and experts stay quantised",
    )
    parser.add_argument("--tp_size", action=Count, default=1, help="ranks that share the model by tensor parallelism")
    parser.add_argument("--pp_size", type=int, default=1, help="pipeline stages; only 1 is supported")
    add_replay_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.pp_size != 1:
        raise UserError(
            f"pp_size is {args.pp_size}; pipeline parallelism is not supported", "divide the model with --tp_size"
        )
    replay = replay_config(args)
    check_chat_template(args.model_dir)

    from trtllm_replayssm.builders.convert import convert
    from trtllm_replayssm.inspection import inspect_model
    from trtllm_replayssm.subject import checkpoint_subject

    with byte_progress(f"converting {args.model_dir}") as report:
        config = convert(
            args.model_dir,
            args.output_dir,
            args.dtype,
            args.tp_size,
            replay,
            progress=report,
            warn=LOGGER.warning,
            quantization=args.quantization,
        )
    print_summary(args.output_dir, inspect_model(checkpoint_subject(config)))
    return 0


def check_chat_template(model_dir: Path) -> None:
    """Raises UserError for a template that serve could not use: the folder that it came with is at hand only now."""
    from trtllm_replayssm.triton.openai.chat import ChatTemplate

    try:
        ChatTemplate(model_dir)
    except UserError as error:
        hint = "download it again, or remove it: without one, the engine completes texts and refuses chats"
        raise UserError(error.message, hint) from None


def print_summary(folder: Path, report: Report) -> None:
    """What was written; ``inspect`` tells more."""
    subject, replay = report.subject, report.subject.replay
    kinds = ", ".join(f"{count} x {kind}" for kind, count in report.kinds().items())
    formats = ", ".join((*report.bits_per_weight, subject.dtype))
    rows = [
        ("model", f"{subject.architecture}: {kinds}"),
        ("weights", f"{bytes_text(report.weight_bytes)} a rank, {formats}, {subject.tp_size} rank(s)"),
        (
            "ReplaySSM",
            f"window {replay.window}, {replay.max_draft_len} drafts, state {replay.state_dtype},"
            f" read as {replay.state_read_dtype}",
        ),
        (
            "recurrent state",
            f"{bytes_text(report.total('state_bytes') + report.total('copy_bytes'))} a request and rank",
        ),
        ("next", f"trtllm-replayssm build --checkpoint_dir {shlex.quote(str(folder))} --output_dir ENGINE_DIR"),
    ]
    print_table(f"checkpoint {folder}", ("", ""), rows)
