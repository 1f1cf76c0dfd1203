"""Writes a complete model repository for Triton Inference Server, for an engine."""

from __future__ import annotations

import argparse

from trtllm_replayssm.cli.options import path_argument
from trtllm_replayssm.cli.serving import add_serving_arguments, serving_options
from trtllm_replayssm.console import LOGGER


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser)
    parser.add_argument("--output_dir", type=path_argument, required=True, help="model repository to write")
    parser.add_argument(
        "--copy_engine", action="store_true", help="put the engine into the repository, so that it can be moved"
    )


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.triton.repository import TEXT_MODEL, TOKEN_MODEL, write_repository

    write_repository(serving_options(args), args.output_dir, args.copy_engine)
    LOGGER.info("%s holds the models %s (token ids) and %s (text)", args.output_dir, TOKEN_MODEL, TEXT_MODEL)
    return 0
