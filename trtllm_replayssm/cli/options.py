"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import get_args

from trtllm_replayssm.replay import Fold, ReplayConfig

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of ReplayConfig, with its defaults."""
    defaults = ReplayConfig()
    group = parser.add_argument_group("ReplaySSM")
    group.add_argument(
        "--replay_window",
        type=int,
        default=defaults.window,
        help="tokens of a request that wait in its ring before the recurrent state is rewritten, 1 to 64",
    )
    group.add_argument(
        "--max_draft_len",
        type=int,
        default=defaults.max_draft_len,
        help="most draft tokens that one step verifies, 0 to 15; 0 is plain decoding",
    )
    group.add_argument(
        "--state_dtype", choices=FLOAT_DTYPES, default=defaults.state_dtype, help="dtype of the recurrent state"
    )
    group.add_argument(
        "--ring_dtype",
        choices=("auto", *FLOAT_DTYPES),
        default=defaults.ring_dtype,
        help="dtype of the ring's activations; auto is the model's dtype, which loses nothing",
    )
    group.add_argument(
        "--replay_fold",
        choices=get_args(Fold),
        default=defaults.fold,
        help="how a delta-rule layer moves its ring into its state: exact recomputes, derived adds up stored updates",
    )


def replay_config(args: argparse.Namespace) -> ReplayConfig:
    """What the options of add_replay_arguments say. Raises UserError when they do not fit together."""
    return ReplayConfig(args.replay_window, args.max_draft_len, args.state_dtype, args.ring_dtype, args.replay_fold)
