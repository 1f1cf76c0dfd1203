"""Options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from trtllm_replayssm.counts import check_count
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import FLOAT_STATES, QUANTISED_STATES, Fold, ReadDtype, ReplayConfig, Rounding


def path_argument(text: str) -> Path:
    """A path of the command line. An empty one is an unset variable of a script, not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path, or . for the current folder")
    return Path(text)


class Count(argparse.Action):
    """One integer or several of ``least`` or more, and no more than fits into 32 bits. Raises UserError for others."""

    def __init__(self, option_strings: Sequence[str], dest: str, least: int = 1, **more: Any) -> None:
        super().__init__(option_strings, dest, type=int, **more)
        self.least = least

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        for value in values if isinstance(values, list) else [values]:
            check_count(option or self.dest, value, self.least)
        setattr(namespace, self.dest, values)


FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def add_replay_arguments(parser: argparse.ArgumentParser, overriding: bool = False) -> None:
    """The fields of ReplayConfig. Absent options mean its defaults, or when overriding, what is stored."""
    defaults = ReplayConfig()
    group = parser.add_argument_group("ReplaySSM", "By default what is stored with the model." if overriding else None)

    def add(name: str, default: Any, text: str, **kind: Any) -> None:
        group.add_argument(name, default=None if overriding else default, help=text, **kind)

    add(
        "--replay_window",
        defaults.window,
        "tokens of a request that wait in its ring before the recurrent state is rewritten, 1 to 64",
        type=int,
    )
    add(
        "--max_draft_len",
        defaults.max_draft_len,
        "most draft tokens that one step verifies, 0 to 15; 0 is plain decoding",
        type=int,
    )
    add(
        "--state_dtype",
        defaults.state_dtype,
        "dtype of the recurrent state; int8 and fp8 have a scale for each row, and lose more the longer a request is",
        choices=FLOAT_STATES + QUANTISED_STATES,
    )
    add(
        "--state_rounding",
        defaults.state_rounding,
        "how Mamba-2 layers round a 16-bit state: to the nearest value, or at random, right on average",
        choices=get_args(Rounding),
    )
    add(
        "--force_quantised_state",
        defaults.force_quantised_state,
        "let delta-rule layers have an int8 or fp8 state, too; their updates feed its rounding back",
        action="store_true",
    )
    add(
        "--state_read_dtype",
        defaults.state_read_dtype,
        "what decode and verify steps read: the state itself (same), or a narrow copy that is kept beside it",
        choices=get_args(ReadDtype),
    )
    add(
        "--ring_dtype",
        defaults.ring_dtype,
        "dtype of the ring's activations; auto is the model's dtype, which loses nothing",
        choices=("auto", *FLOAT_DTYPES),
    )
    add(
        "--replay_fold",
        defaults.fold,
        "how a delta-rule layer moves its ring into its state: exact recomputes, derived adds up stored updates",
        choices=get_args(Fold),
    )


def replay_config(args: argparse.Namespace, base: ReplayConfig | None = None) -> ReplayConfig:
    """What the options of add_replay_arguments say, over ``base``. Raises UserError when they do not fit together."""
    options = {
        "window": args.replay_window,
        "max_draft_len": args.max_draft_len,
        "state_dtype": args.state_dtype,
        "state_read_dtype": args.state_read_dtype,
        "ring_dtype": args.ring_dtype,
        "fold": args.replay_fold,
        "state_rounding": args.state_rounding,
        "force_quantised_state": args.force_quantised_state,
    }
    return replace(base or ReplayConfig(), **{name: value for name, value in options.items() if value is not None})


def prefix_cache_bytes(args: argparse.Namespace) -> int:
    """Bytes of --prefix_cache_gib. Raises UserError for what is no amount."""
    gib: float = args.prefix_cache_gib
    if not 0 <= gib < math.inf:
        raise UserError(f"--prefix_cache_gib is {gib}", "give a number of GiB, or 0 for no cache")
    return round(gib * 2**30)


def add_scaled_matmul_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scaled_matmul",
        action="store_true",
        help="round activations to FP8, token by token, and multiply FP8 weights that were kept as they are; less exact",
    )


def add_running_arguments(parser: argparse.ArgumentParser) -> None:
    """How an engine is run: who drafts, what is kept, and on what it computes."""
    speculation = parser.add_argument_group(
        "speculative decoding", "Greedy texts stay the same; sampled ones keep their distribution."
    )
    speculation.add_argument(
        "--speculative_decoding_mode",
        choices=("ngram", "draft_model", "mtp"),
        help="who drafts: the text itself, another engine, or the checkpoint's multi-token prediction head",
    )
    speculation.add_argument(
        "--max_draft_len", type=int, help="most drafts of a step; by default what the engine was built for"
    )
    speculation.add_argument("--draft_engine_dir", type=path_argument, help="engine of the draft model, for that mode")
    parser.add_argument(
        "--prefix_cache_gib",
        type=float,
        default=0,
        help="memory for what prompts begin with in common, which is then computed once; by default none",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument(
        "--plugin_impl",
        choices=("auto", "reference", "cuda"),
        default="auto",
        help="who computes the recurrent layers: the CUDA kernels, plain torch, or the fastest that the device has",
    )
    parser.add_argument(
        "--no_cuda_graphs",
        action="store_true",
        help="launch every kernel of a decode step by itself; the output is the same (also: TRTLLM_REPLAYSSM_CUDA_GRAPHS=0)",
    )
    add_scaled_matmul_argument(parser)
