"""Options that several commands share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from trtllm_replayssm.replay import Fold, ReplayConfig


def path_argument(text: str) -> Path:
    """A path of the command line. An empty one is an unset variable of a script, not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path, or . for the current folder")
    return Path(text)


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
    add("--state_dtype", defaults.state_dtype, "dtype of the recurrent state", choices=FLOAT_DTYPES)
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
        "ring_dtype": args.ring_dtype,
        "fold": args.replay_fold,
    }
    return replace(base or ReplayConfig(), **{name: value for name, value in options.items() if value is not None})
