"""Arguments of ``bench``, and the combinations of them that make no sense."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from trtllm_replayssm.cli.options import (
    FLOAT_DTYPES,
    Count,
    add_scaled_matmul_argument,
    path_argument,
    prefix_cache_bytes,
)
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import FLOAT_STATES, QUANTISED_STATES, Fold, ReadDtype

#: Tokens of a random request's prompt, and of an answer, on average.
MEAN_TOKENS = 128
#: What only random requests have.
RANDOM_OPTIONS = ("input_len", "input_stdev", "output_stdev")
THROUGHPUT_PLOT = "decode_throughput.png"
#: Options that shape the engine of a synthetic config: name, what argparse is told, and help.
SYNTHETIC_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("dtype", {"choices": FLOAT_DTYPES}, "of activations and weights; by default bfloat16"),
    ("tp_size", {"action": Count}, "ranks; by default 1"),
    ("max_batch_size", {"action": Count}, "requests that run at the same time; by default 8"),
    ("max_seq_len", {"action": Count}, "most tokens of a request; by default 4096, or what the model was trained for"),
    ("max_num_tokens", {"action": Count}, "most tokens of a prefill step; by default 8192"),
    ("replay_window", {"type": int}, "tokens of a request that wait in its ring; by default 16"),
    ("state_dtype", {"choices": FLOAT_STATES + QUANTISED_STATES}, "dtype of the recurrent state; by default float32"),
    ("state_read_dtype", {"choices": get_args(ReadDtype)}, "what decode and verify steps read of it; by default same"),
    ("ring_dtype", {"choices": ("auto", *FLOAT_DTYPES)}, "dtype of the ring's activations; by default auto"),
    ("replay_fold", {"choices": get_args(Fold)}, "how a delta-rule layer folds; by default exact"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--engine_dir", type=path_argument, help="folder written by build")
    source.add_argument(
        "--synthetic_config",
        type=path_argument,
        help="config.json of a model, which gets random weights: its true speed",
    )
    synthetic = parser.add_argument_group("engine of a --synthetic_config", "As for convert and build.")
    for name, kind, text in SYNTHETIC_OPTIONS:
        synthetic.add_argument(f"--{name}", help=text, **kind)
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--dataset",
        type=path_argument,
        help='JSONL with {"input_ids" or "prompt", "output_tokens"}; else random tokens',
    )
    requests.add_argument("--num_requests", action=Count, help="how many; by default 64, or all of a data set")
    requests.add_argument(
        "--input_len", action=Count, help=f"mean prompt tokens of random requests; by default {MEAN_TOKENS}"
    )
    requests.add_argument("--input_stdev", type=float, help="standard deviation of their prompt tokens; by default 0")
    requests.add_argument(
        "--output_len",
        action=Count,
        help=f"mean output tokens, and those of rows of a data set that do not say; by default {MEAN_TOKENS}",
    )
    requests.add_argument("--output_stdev", type=float, help="standard deviation of the output tokens; by default 0")
    requests.add_argument("--random_seed", type=int, default=0, help="of lengths, tokens and arrivals")
    load = parser.add_argument_group("load", "By default all requests arrive at once.")
    exclusive = load.add_mutually_exclusive_group()
    exclusive.add_argument("--request_rate", type=float, help="requests a second, arriving as a Poisson process")
    exclusive.add_argument(
        "--concurrency", action=Count, help="requests under way; one that ends makes room for the next"
    )
    load.add_argument("--warmup", action=Count, least=0, default=2, help="requests that run before the clock starts")
    load.add_argument("--prefix_cache_gib", type=float, default=0, help="memory for common beginnings of prompts")
    speculation = parser.add_argument_group("speculative decoding")
    speculation.add_argument(
        "--speculative_decoding_mode", choices=("ngram", "draft_model", "mtp"), help="as for generate"
    )
    speculation.add_argument("--max_draft_len", type=int, help="most drafts of a step; by default the engine's")
    speculation.add_argument("--draft_engine_dir", type=path_argument, help="engine of the draft model, for that mode")
    speculation.add_argument(
        "--forced_acceptance_length",
        type=int,
        help="keep so many tokens of every verify step, whatever the model says: speed without a trained model",
    )
    steps = parser.add_argument_group("decode steps instead of requests")
    steps.add_argument(
        "--decode_batch_sizes", action=Count, nargs="+", metavar="N", help="compare the modes at these sizes"
    )
    steps.add_argument("--profile_context_lens", action=Count, nargs="+", metavar="N", help="parts of a step, on a GPU")
    steps.add_argument("--context_len", action=Count, default=1024, help="tokens that every request holds at first")
    steps.add_argument(
        "--steps", action=Count, default=64, help="steps of one measurement, rounded up to whole windows"
    )
    steps.add_argument(
        "--batch_size", action=Count, help="requests of a profiled step; by default all slots of the engine"
    )
    steps.add_argument("--draft_len", action=Count, least=0, default=3, help="drafts of a speculative step")
    steps.add_argument("--accepted", action=Count, default=3, help="tokens that a speculative step keeps")
    parser.add_argument("--plot_dir", type=path_argument, help="folder for PNG plots of decode steps")
    parser.add_argument("--report_json", type=path_argument, help="file to write, in the shape of trtllm-bench's")
    parser.add_argument("--report_csv", type=path_argument, help="file to write, a row a request")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument(
        "--plugin_impl", choices=("auto", "reference", "cuda"), default="auto", help="who computes the recurrent layers"
    )
    add_scaled_matmul_argument(parser)


def check_options(args: argparse.Namespace) -> None:
    """Raises UserError for values that make no sense, and options that would do nothing; asked before long work."""
    if args.random_seed < 0:
        raise UserError(f"--random_seed is {args.random_seed}; it must be 0 or more")
    prefix_cache_bytes(args)
    if args.scaled_matmul and args.engine_dir is None:
        raise UserError("--scaled_matmul is for FP8 weights, and random ones are not quantised", "give an --engine_dir")
    if args.dataset is not None:
        for name in RANDOM_OPTIONS:
            if getattr(args, name) is not None:
                raise UserError(f"--{name} is for random requests", "those of a --dataset have lengths of their own")
    if measures_steps(args):
        if args.report_csv is not None:
            raise UserError("--report_csv has a row a request, and decode steps have none", "use --report_json")
    elif args.plot_dir is not None:
        raise UserError("--plot_dir is for decode steps", "add --decode_batch_sizes or --profile_context_lens")
    if args.plot_dir is not None:
        from trtllm_replayssm.bench.plots import check_matplotlib
        from trtllm_replayssm.runtime.files import check_writable

        check_matplotlib()
        args.plot_dir.mkdir(parents=True, exist_ok=True)
        check_writable(args.plot_dir / THROUGHPUT_PLOT)


def check_batch_sizes(args: argparse.Namespace, max_batch_size: int) -> None:
    """Raises UserError for steps of more requests than the engine at hand was built for."""
    for name, sizes in (("decode_batch_sizes", args.decode_batch_sizes or ()), ("batch_size", (args.batch_size or 1,))):
        if max(sizes, default=1) > max_batch_size:
            raise UserError(
                f"--{name} {max(sizes)} is more than the {max_batch_size} requests that the engine was built for",
                "build with a larger --max_batch_size, or measure a --synthetic_config",
            )


def measures_steps(args: argparse.Namespace) -> bool:
    """Whether decode steps are measured, rather than requests."""
    return args.decode_batch_sizes is not None or args.profile_context_lens is not None
