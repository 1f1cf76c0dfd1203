"""The requests of a benchmark: random ones of chosen lengths, or those of a data set."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_replayssm.counts import LARGEST, check_count
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.tokenizer import check_unicode

#: Random requests are drawn before the first one runs.
MOST_REQUESTS = 1_000_000
ROW = 'a row is {"input_ids": [1, 2, ...], "output_tokens": 128} or {"prompt": "...", "output_tokens": 128}'


@dataclass(frozen=True)
class Item:
    """One request. output_tokens: exactly so many are generated; end tokens are ignored."""

    prompt: list[int]
    output_tokens: int


def random_items(
    count: int,
    input_len: int,
    output_len: int,
    vocab_size: int,
    input_stdev: float = 0,
    output_stdev: float = 0,
    seed: int = 0,
    max_seq_len: int = LARGEST,
) -> list[Item]:
    """Requests of uniformly drawn tokens; lengths are normally distributed around their means, and at least 1.

    Raises UserError for counts and lengths below 1, deviations that are negative, no numbers or above LARGEST, and, before
    any token is drawn, for more than MOST_REQUESTS and for prompts that leave no room for output in ``max_seq_len``.
    """
    for name, value in (("num_requests", count), ("input_len", input_len), ("output_len", output_len)):
        check_count(name, value)
    if count > MOST_REQUESTS:
        raise UserError(f"num_requests is {count}; it must be {MOST_REQUESTS} or less")
    for name, deviation in (("input_stdev", input_stdev), ("output_stdev", output_stdev)):
        if not 0 <= deviation <= LARGEST:
            raise UserError(f"{name} is {deviation}; it must be 0 to {LARGEST}", "use 0 for requests of equal lengths")
    generator = np.random.default_rng(seed)

    def lengths(mean: int, deviation: float) -> list[int]:
        return [max(1, round(value)) for value in generator.normal(mean, deviation, count).tolist()]

    inputs, outputs = lengths(input_len, input_stdev), lengths(output_len, output_stdev)
    if (longest := max(inputs)) >= max_seq_len:
        raise UserError(
            f"the longest prompt is {longest} tokens, which leaves no room for output in {max_seq_len}",
            "lower --input_len or --input_stdev",
        )
    return [Item(generator.integers(0, vocab_size, n).tolist(), out) for n, out in zip(inputs, outputs)]


def read_items(path: Path, encode: Callable[[str], list[int]], default_output: int) -> list[Item]:
    """Requests of a JSONL file, with the keys of trtllm-bench's data sets.

    encode: text to token ids. default_output: tokens of rows without ``output_tokens``.
    Raises UserError that names the line when a row is not what it should be.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    items = [
        read_item(line, f"{path} line {number}", encode, default_output)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise UserError(f"{path} holds no requests", ROW)
    return items


def read_item(line: bytes, where: str, encode: Callable[[str], list[int]], default_output: int) -> Item:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}", ROW) from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}", ROW)
    ids, text, output = row.get("input_ids"), row.get("prompt"), row.get("output_tokens", default_output)
    if type(output) is not int or output < 1:
        raise UserError(f"{where}: output_tokens is {output!r}; it must be an integer of 1 or more", ROW)
    if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        return Item(ids, output)
    if isinstance(text, str) and ids is None:
        check_unicode(text, f"{where}: prompt")
        if not (ids := encode(text)):
            raise UserError(f"{where}: the prompt has no tokens", ROW)
        return Item(ids, output)
    raise UserError(f"{where} has neither token ids nor text", ROW)
