"""Puts the weights of a checkpoint into an engine that was built with --strip_plan."""

from __future__ import annotations

import argparse

from trtllm_replayssm.cli.options import path_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", type=path_argument, required=True, help="folder written by convert")
    parser.add_argument("--engine_dir", type=path_argument, required=True, help="engine built with --strip_plan")
    parser.add_argument(
        "--output_dir", type=path_argument, required=True, help="folder to write; an earlier engine in it is replaced"
    )


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.cli.build import print_summary
    from trtllm_replayssm.runtime.tensorrt.refit import refit_engine

    print_summary(args.output_dir, refit_engine(args.checkpoint_dir, args.engine_dir, args.output_dir))
    return 0
