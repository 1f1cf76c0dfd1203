"""Builds an engine folder (config.json and one rank{N}.engine per rank) from a TensorRT-LLM checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import add_replay_arguments, path_argument
from trtllm_replayssm.console import byte_progress, bytes_text, print_table

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.engine_config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", type=path_argument, required=True, help="folder written by convert")
    parser.add_argument(
        "--output_dir", type=path_argument, required=True, help="folder to write; an earlier engine in it is replaced"
    )
    parser.add_argument(
        "--engine_flavour",
        default="embedded",
        help="what runs the engine; embedded is this package with torch, on any CPU or CUDA device",
    )
    parser.add_argument(
        "--max_batch_size", type=int, default=8, help="requests that run together, one slot of state each"
    )
    parser.add_argument(
        "--max_seq_len",
        type=int,
        help="most tokens of a request, prompt and output; by default 4096, or less where the model was trained for less",
    )
    parser.add_argument("--max_num_tokens", type=int, default=8192, help="most tokens of all requests in one step")
    add_replay_arguments(parser, overriding=True)


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.runtime.build import build_engine
    from trtllm_replayssm.runtime.engine_config import BuildOptions

    options = BuildOptions(
        max_batch_size=args.max_batch_size,
        max_seq_len=args.max_seq_len,
        max_num_tokens=args.max_num_tokens,
        engine_flavour=args.engine_flavour,
        replay_window=args.replay_window,
        max_draft_len=args.max_draft_len,
        state_dtype=args.state_dtype,
        ring_dtype=args.ring_dtype,
        replay_fold=args.replay_fold,
    )
    with byte_progress(f"building {args.output_dir}") as report:
        config = build_engine(args.checkpoint_dir, args.output_dir, options, report)
    print_summary(args.output_dir, config)
    return 0


def print_summary(folder: Path, config: EngineConfig) -> None:
    """What was built; ``inspect`` tells more."""
    prompt = '--input_text "..."' if (folder / "tokenizer.json").is_file() else "--input_file ROWS_WITH_INPUT_IDS.jsonl"
    rows = [
        ("flavour", config.engine_flavour),
        ("weights", f"{bytes_text(max(config.rank_bytes))} a rank, {config.world_size} rank(s)"),
        ("state", f"{bytes_text(config.slot_bytes())} a request and rank, KV cache of {config.max_seq_len} included"),
        ("limits", f"{config.max_batch_size} requests, {config.max_seq_len} tokens each"),
        ("next", f"trtllm-replayssm generate --engine_dir {folder} {prompt}"),
    ]
    print_table(f"engine {folder}", ("", ""), rows)
