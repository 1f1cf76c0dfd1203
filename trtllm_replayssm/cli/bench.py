"""Measures an engine: requests with their latencies, or decode steps by batch size, or the parts of a step.

Without more options, random requests or those of a data set run to their full length; latencies are TTFT, TPOT, ITL and end to
end, as trtllm-bench defines them. With --decode_batch_sizes the same weights decode as an ordinary engine, with ReplaySSM, and
with ReplaySSM and speculation. With --profile_context_lens a GPU's time in a step is divided into its parts.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.cli.bench_options import (
    MEAN_TOKENS,
    SYNTHETIC_OPTIONS,
    THROUGHPUT_PLOT,
    add_arguments,
    check_batch_sizes,
    check_options,
    measures_steps,
)
from trtllm_replayssm.cli.generate import speculation_options
from trtllm_replayssm.cli.options import prefix_cache_bytes
from trtllm_replayssm.cli.ranks import on_every_rank
from trtllm_replayssm.console import LOGGER, print_table
from trtllm_replayssm.errors import UserError

if TYPE_CHECKING:
    from trtllm_replayssm.bench.decode import DecodeTiming
    from trtllm_replayssm.bench.profile import StepProfile
    from trtllm_replayssm.bench.workload import Item
    from trtllm_replayssm.runtime.engine import Engine
    from trtllm_replayssm.runtime.scheduler import Scheduler
    from trtllm_replayssm.runtime.session import Session

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.runtime.engine_config import EngineConfig
    from trtllm_replayssm.runtime.files import check_distinct, check_writable

    files = {name: getattr(args, name) for name in ("dataset", "report_json", "report_csv")}
    check_distinct({f"--{name}": path for name, path in files.items() if path is not None})
    for path in (args.report_json, args.report_csv):
        if path is not None:
            check_writable(path)
    check_options(args)
    given = {name: value for name, *_ in SYNTHETIC_OPTIONS if (value := getattr(args, name)) is not None}
    if args.engine_dir is not None and given:
        raise UserError(
            f"--{next(iter(given))} shapes the engine of a --synthetic_config",
            "an engine folder was built with its own",
        )
    if args.engine_dir is None:
        return on_every_rank(args.tp_size or 1, bench, args)
    config = EngineConfig.read(args.engine_dir)
    check_batch_sizes(args, config.max_batch_size)
    return on_every_rank(config.world_size, bench, args)


def bench(args: argparse.Namespace) -> int:
    """Load the engine, or this process's rank of it, run the requests, and report on rank 0."""
    from trtllm_replayssm.runtime.engine import Engine
    from trtllm_replayssm.runtime.ranks import lost_ranks

    if args.engine_dir is not None:
        engine = Engine.load(
            args.engine_dir, device=args.device, plugin_impl=args.plugin_impl, scaled_matmul=args.scaled_matmul
        )
    else:
        engine = synthetic(args)
    with lost_ranks(engine.config.world_size):
        if measures_steps(args):
            return bench_steps(args, engine)
        return bench_requests(args, engine)


def synthetic(args: argparse.Namespace) -> Engine:
    """This process's rank of an engine with random weights. Raises CheckpointError, UserError or EngineError."""
    from trtllm_replayssm.runtime.engine_config import BuildOptions
    from trtllm_replayssm.runtime.synthetic import synthetic_checkpoint, synthetic_engine

    longest = 0 if args.max_draft_len is None else args.max_draft_len
    options = {name: getattr(args, name) for name, *_ in SYNTHETIC_OPTIONS if name not in ("dtype", "tp_size")}
    build = BuildOptions(**{name: value for name, value in options.items() if value is not None}, max_draft_len=longest)
    checkpoint = synthetic_checkpoint(args.synthetic_config, args.dtype or "bfloat16", args.tp_size or 1)
    return synthetic_engine(checkpoint, build, args.device, args.random_seed, args.plugin_impl)


def bench_steps(args: argparse.Namespace, engine: Engine) -> int:
    from trtllm_replayssm.bench.decode import decode_timings, modes
    from trtllm_replayssm.bench.machine import machine_info
    from trtllm_replayssm.bench.plots import plot_shares, plot_throughput
    from trtllm_replayssm.bench.profile import step_profiles
    from trtllm_replayssm.bench.steps_report import profile_rows, steps_report, timing_rows

    chosen = modes(engine.config.replay, args.draft_len, args.accepted)
    timings: list[DecodeTiming] = []
    profiles: list[StepProfile] = []
    for timing in decode_timings(engine, args.decode_batch_sizes or (), args.context_len, chosen, args.steps):
        timings.append(timing)
        progress = (timing.batch_size, timing.mode, timing.tokens_per_second, timing.step_ms.average)
        LOGGER.log(level(engine), "batch %d, %s: %.1f tokens/s, %.3f ms a step", *progress)
    size, lengths = args.batch_size or engine.config.max_batch_size, args.profile_context_lens or ()
    for mode in chosen:
        for profile in step_profiles(engine, mode, size, lengths, args.steps):
            profiles.append(profile)
            shares = ", ".join(f"{part} {share:.1%}" for part, share in profile.shares.items())
            LOGGER.log(level(engine), "after %d tokens, %s: %s", profile.context_len, mode.name, shares)
    if engine.rank != 0:
        return 0
    machine = machine_info(engine.device)
    where = f"{engine.config.checkpoint.hf_architecture} on {machine['name']}"
    plots = args.plot_dir
    if timings:
        print_table(f"decode after {args.context_len} tokens, {where}", *timing_rows(timings))
        if plots is not None:
            plot_throughput(plots / THROUGHPUT_PLOT, timings, where)
    if profiles:
        print_table(f"milliseconds of a step by part, {size} requests, {where}", *profile_rows(profiles))
    for mode in chosen:
        by_length = {found.context_len: found.shares for found in profiles if found.mode == mode.name}
        if plots is not None and by_length:
            plot_shares(plots / f"step_shares_{mode.name}.png", by_length, f"{mode.name}, {size} requests, {where}")
    report = steps_report(engine, machine, settings(args), timings, profiles)
    write({args.report_json: json.dumps(report, indent=2) + "\n"})
    return 0


def level(engine: Engine) -> int:
    """Log level of what one rank says for all."""
    return logging.INFO if engine.rank == 0 else logging.DEBUG


def bench_requests(args: argparse.Namespace, engine: Engine) -> int:
    from trtllm_replayssm.bench.driver import run_requests
    from trtllm_replayssm.bench.machine import machine_info
    from trtllm_replayssm.bench.report import requests_csv, requests_report, table_rows
    from trtllm_replayssm.runtime.session import Session

    session = Session(engine)
    items = workload(args, session)
    scheduler, mode = scheduler_for(args, session)
    if args.warmup:
        run_requests(scheduler, list(islice(cycle(items), args.warmup)))
    scheduler = scheduler_for(args, session)[0]
    records = run_requests(scheduler, items, args.request_rate, args.concurrency, args.random_seed)
    if session.engine.rank != 0:
        return 0
    report = requests_report(session, records, mode, settings(args), machine_info(session.engine.device))
    print_table(f"{report['engine']['model']} on {report['machine']['name']}", ("", ""), table_rows(report))
    write({args.report_json: json.dumps(report, indent=2) + "\n", args.report_csv: requests_csv(records)})
    return 0


def workload(args: argparse.Namespace, session: Session) -> list[Item]:
    from trtllm_replayssm.bench.workload import random_items, read_items
    from trtllm_replayssm.runtime.tokenizer import Tokenizer

    engine = session.engine
    output_len = args.output_len or MEAN_TOKENS
    if args.dataset is None:
        known = engine.config.checkpoint.num_tokens or engine.decoder.vocab_size
        lengths = (args.input_len or MEAN_TOKENS, output_len, known, args.input_stdev or 0, args.output_stdev or 0)
        return random_items(args.num_requests or 64, *lengths, args.random_seed, engine.config.max_seq_len)
    items = read_items(args.dataset, lambda text: Tokenizer(engine.folder).encode(text), output_len)
    if args.num_requests is not None and args.num_requests > len(items):
        raise UserError(f"--num_requests is {args.num_requests}; {args.dataset} holds {len(items)} requests")
    return items[: args.num_requests]


def scheduler_for(args: argparse.Namespace, session: Session) -> tuple[Scheduler, str | None]:
    """A scheduler with empty statistics and prefix cache, and the name of the speculation."""
    from trtllm_replayssm.bench.forced import ForcedScheduler
    from trtllm_replayssm.runtime.prefix_cache import PrefixCache
    from trtllm_replayssm.runtime.scheduler import Scheduler

    cache_bytes = prefix_cache_bytes(args)
    cache = PrefixCache(session, cache_bytes) if cache_bytes else None
    if args.forced_acceptance_length is not None:
        if args.speculative_decoding_mode is not None:
            raise UserError("--forced_acceptance_length takes the place of a --speculative_decoding_mode", "give one")
        forced = ForcedScheduler(session, args.forced_acceptance_length, args.max_draft_len)
        forced.prefix_cache = cache
        return forced, f"forced acceptance_length {args.forced_acceptance_length}"
    options = speculation_options(args)
    if options is None:
        return Scheduler(session, prefix_cache=cache), None
    return Scheduler(session, options.drafter(session), options.max_draft_len, prefix_cache=cache), options.mode


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the run, to repeat it."""
    left_out = ("run", "command", "log_level")
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in left_out
    }


def write(texts: Mapping[Path | None, str]) -> None:
    """The files that were asked for, each complete or not at all."""
    from trtllm_replayssm.runtime.files import output_file

    for path, text in texts.items():
        if path is not None:
            with output_file(path) as file:
                file.write(text.encode())
            LOGGER.info("wrote %s", path)
