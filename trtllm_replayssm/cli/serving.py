"""Options that say how an engine is served; they become parameters of the model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import path_argument
from trtllm_replayssm.errors import UserError

if TYPE_CHECKING:
    from trtllm_replayssm.triton.options import ServingOptions


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of ServingOptions."""
    parser.add_argument("--engine_dir", type=path_argument, required=True, help="folder written by build")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument(
        "--plugin_impl",
        choices=("auto", "reference", "cuda"),
        default="auto",
        help="who computes the recurrent layers: the CUDA kernels, plain torch, or the fastest that the device has",
    )
    parser.add_argument(
        "--speculative_decoding_mode",
        choices=("ngram", "draft_model", "mtp"),
        help="who drafts: the text itself, another engine, or the checkpoint's multi-token prediction head",
    )
    parser.add_argument(
        "--max_draft_len", type=int, help="most drafts of a step; by default what the engine was built for"
    )
    parser.add_argument("--draft_engine_dir", type=path_argument, help="engine of the draft model, for that mode")
    parser.add_argument(
        "--include_input_in_output",
        action="store_true",
        help="output_ids begin with the prompt where a request does not say",
    )
    parser.add_argument(
        "--cancellation_check_period_ms", type=int, default=100, help="how often it is looked whether clients have left"
    )


def serving_options(args: argparse.Namespace) -> ServingOptions:
    """What the arguments say. Raises UserError when they do not fit together, or the engine."""
    from trtllm_replayssm.cli.generate import speculation_options
    from trtllm_replayssm.triton.options import ServingOptions

    if args.cancellation_check_period_ms < 1:
        raise UserError("--cancellation_check_period_ms must be 1 or more")
    speculation_options(args)
    return ServingOptions(
        engine_dir=str(args.engine_dir),
        device=args.device or "",
        plugin_impl=args.plugin_impl,
        speculative_decoding_mode=args.speculative_decoding_mode or "",
        max_draft_len=args.max_draft_len,
        draft_engine_dir=str(args.draft_engine_dir or ""),
        exclude_input_in_output=not args.include_input_in_output,
        cancellation_check_period_ms=args.cancellation_check_period_ms,
        log_level=args.log_level,
    )
