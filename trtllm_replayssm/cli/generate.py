"""Generates text with an engine: one prompt is streamed to the terminal, JSONL rows come back as JSONL rows."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.cli.options import (
    Count,
    add_running_arguments,
    path_argument,
    prefix_cache_bytes,
)
from trtllm_replayssm.cli.ranks import on_every_rank
from trtllm_replayssm.console import LOGGER, print_line
from trtllm_replayssm.errors import UserError, not_utf8

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.outputs import RequestId, RequestOutput
    from trtllm_replayssm.runtime.speculation.options import SpeculationOptions
    from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine_dir", type=path_argument, required=True, help="folder written by build")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--input_text", action="append", help="a prompt; may be given several times")
    prompts.add_argument(
        "--input_file", type=path_argument, help='JSONL file with rows {"prompt": "..."} or {"input_ids": [1, 2, ...]}'
    )
    parser.add_argument("--max_output_len", action=Count, default=32, help="most tokens to generate for a prompt")
    sampling = parser.add_argument_group("sampling", "Greedy when none of temperature, top_k and top_p is given.")
    sampling.add_argument("--temperature", type=float, help="divides the logits; 0 is greedy")
    sampling.add_argument("--top_k", type=int, help="choose among so many of the likeliest tokens; 0 for all")
    sampling.add_argument("--top_p", type=float, help="choose among the likeliest tokens that reach this probability")
    sampling.add_argument("--random_seed", type=int, default=0, help="the same seed gives the same text in any batch")
    sampling.add_argument("--repetition_penalty", type=float, help="above 1: tokens of prompt and text are less likely")
    sampling.add_argument("--presence_penalty", type=float, help="above 0: tokens of the text are less likely")
    sampling.add_argument("--frequency_penalty", type=float, help="the same, times how often the text has them")
    sampling.add_argument("--min_tokens", action=Count, least=0, default=0, help="tokens before which no text ends")
    sampling.add_argument("--end_id", type=int, help="token that ends a text; -1 for none; by default the model's own")
    sampling.add_argument("--stop", action="append", help="string that ends a text; may be given several times")
    parser.add_argument(
        "--output_file",
        type=path_argument,
        help='JSONL file to write: rows {"output_ids", "text", "finish_reason"} in input order',
    )
    parser.add_argument(
        "--generation_logits_file",
        type=path_argument,
        help="safetensors file to write: per row, named by its index, the float32 logits [tokens, vocab] of its choices; "
        "-inf for ids that the tokenizer does not have",
    )
    add_running_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.runtime.engine_config import EngineConfig
    from trtllm_replayssm.runtime.files import check_distinct, check_writable

    files = {name: getattr(args, name) for name in ("input_file", "output_file", "generation_logits_file")}
    check_distinct({f"--{name}": path for name, path in files.items() if path is not None})
    for path in (args.output_file, args.generation_logits_file):
        if path is not None:
            check_writable(path)
    return on_every_rank(EngineConfig.read(args.engine_dir).world_size, generate, args)


def generate(args: argparse.Namespace) -> int:
    """Load the engine, or this process's rank of it, run the prompts, and write the results on rank 0."""
    from trtllm_replayssm.runtime.llm import LLM
    from trtllm_replayssm.runtime.sampling import SamplingParams

    if args.random_seed < 0:
        raise UserError(f"--random_seed is {args.random_seed}; it must be 0 or more")
    if args.min_tokens > args.max_output_len:
        raise UserError(f"--min_tokens {args.min_tokens} is more than --max_output_len {args.max_output_len}")
    cache_bytes = prefix_cache_bytes(args)
    params = SamplingParams(
        max_tokens=args.max_output_len,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.random_seed,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        min_tokens=args.min_tokens,
        end_id=args.end_id,
        stop=args.stop,
        return_generation_logits=args.generation_logits_file is not None,
    )
    speculation = speculation_options(args)
    prompts = args.input_text or read_rows(args.input_file)
    llm = LLM(
        args.engine_dir,
        device=args.device,
        plugin_impl=args.plugin_impl,
        speculation=speculation,
        prefix_cache_bytes=cache_bytes,
        cuda_graphs=False if args.no_cuda_graphs else None,
        scaled_matmul=args.scaled_matmul,
    )
    reports = llm.engine.rank == 0
    streams = reports and args.output_file is None and args.input_text is not None and len(prompts) == 1
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, on_text=show_piece if streams else lambda index, text: None)
    seconds = time.perf_counter() - start
    assert isinstance(outputs, list)
    if not reports:
        return 0
    if streams:
        print_line()
    elif args.output_file is None:
        print_results(outputs, as_rows=args.input_text is None, has_text=llm.has_tokenizer)
    write_results(args, outputs, llm.has_tokenizer)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    LOGGER.info("%d tokens of %d request(s) in %.2f s: %.1f tokens/s", tokens, len(outputs), seconds, tokens / seconds)
    if speculation is not None:
        report_speculation(llm.scheduler.statistics)
    if (cache := llm.scheduler.prefix_cache) is not None:
        found = cache.statistics
        LOGGER.info("%d of %d prompt tokens came from the prefix cache", found.hits, found.queries)
    return 0


def speculation_options(args: argparse.Namespace) -> SpeculationOptions | None:
    """What the options ask for. Raises UserError when they do not fit together."""
    from trtllm_replayssm.runtime.speculation.options import SpeculationOptions

    if args.speculative_decoding_mode is not None:
        return SpeculationOptions(args.speculative_decoding_mode, args.max_draft_len, args.draft_engine_dir)
    for name in ("max_draft_len", "draft_engine_dir"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is for speculative decoding", "choose a --speculative_decoding_mode")
    return None


def report_speculation(counts: SpeculationStatistics) -> None:
    LOGGER.info(
        "num_draft_tokens %d, num_accepted_draft_tokens %d, draft_acceptance_rate %.3f, acceptance_length %.2f",
        counts.num_draft_tokens,
        counts.num_accepted_draft_tokens,
        counts.draft_acceptance_rate,
        counts.acceptance_length,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file. Raises UserError that names the line when one is not what it should be."""
    try:
        # Not by splitlines: a string of JSON may hold other line separators as they are.
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    rows = [parse_row(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} holds no rows", 'write one JSON object per line: {"prompt": "..."}')
    return rows


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    from trtllm_replayssm.runtime.tokenizer import check_unicode

    hint = 'a row is {"prompt": "..."} or {"input_ids": [1, 2, ...]}'
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, hint) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}", hint) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}", hint) from None
    if not isinstance(row, dict) or set(row) not in ({"prompt"}, {"input_ids"}):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise UserError(f"{where} must have the key prompt or input_ids and no other; found {found}", hint)
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise UserError(f"{where}: prompt is not a string", hint)
        check_unicode(row["prompt"], f"{where}: prompt")
    elif not isinstance(row["input_ids"], list) or not all(type(token) is int for token in row["input_ids"]):
        raise UserError(f"{where}: input_ids is not a list of integers", hint)
    return row


def show_piece(index: RequestId, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def result_row(output: RequestOutput, has_text: bool) -> dict[str, Any]:
    """text is null where the engine has no tokenizer."""
    completion = output.outputs[0]
    text = completion.text if has_text else None
    return {"output_ids": completion.token_ids, "text": text, "finish_reason": completion.finish_reason}


def print_results(outputs: Sequence[RequestOutput], as_rows: bool, has_text: bool) -> None:
    """JSON rows for the rows of a file; each prompt with its text for prompts of the command line."""
    for output in outputs:
        if as_rows:
            print_line(json.dumps(result_row(output, has_text), ensure_ascii=False))
        else:
            print_line(f"[{output.request_id}] {output.prompt}{output.outputs[0].text}")


def write_results(args: argparse.Namespace, outputs: Sequence[RequestOutput], has_text: bool) -> None:
    """The files that were asked for, each complete or not at all."""
    from safetensors.torch import save

    from trtllm_replayssm.runtime.files import output_file

    if args.output_file is not None:
        rows = [json.dumps(result_row(output, has_text), ensure_ascii=False) for output in outputs]
        with output_file(args.output_file) as file:
            file.write("".join(row + "\n" for row in rows).encode())
    if args.generation_logits_file is not None:
        logits = {str(output.request_id): output.outputs[0].generation_logits for output in outputs}
        with output_file(args.generation_logits_file) as file:
            file.write(save({name: tensor for name, tensor in logits.items() if tensor is not None}))
