"""Makes a TensorRT-LLM checkpoint (config.json and one rank{N}.safetensors per rank) from a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_replayssm.cli.options import FLOAT_DTYPES, add_replay_arguments, replay_config
from trtllm_replayssm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model_dir", type=Path, required=True, help="Hugging Face folder: config.json, *.safetensors")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write; must be absent or empty")
    parser.add_argument(
        "--dtype",
        choices=("auto", *FLOAT_DTYPES),
        default="auto",
        help="dtype of activations and of weights that need not stay in float32; auto is what the config says",
    )
    parser.add_argument("--tp_size", type=int, default=1, help="ranks that share the model by tensor parallelism")
    parser.add_argument("--pp_size", type=int, default=1, help="pipeline stages; only 1 is supported")
    add_replay_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.pp_size != 1:
        raise UserError(
            f"pp_size is {args.pp_size}; pipeline parallelism is not supported", "divide the model with --tp_size"
        )
    raise NotImplementedError
