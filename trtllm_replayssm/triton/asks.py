"""What a client asks for: input tensors, read and checked, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_replayssm.errors import UserError, not_utf8
from trtllm_replayssm.runtime.sampling import SamplingParams

#: Input tensors by name; strings are object arrays of bytes.
Arrays = Mapping[str, np.ndarray]

#: Inputs that the backend of TensorRT-LLM has and this engine has not, with the values under which they change nothing.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "beam_width": (0, 1),
    "num_return_sequences": (0, 1),
    "len_penalty": (0, 1),
    "return_context_logits": (0,),
}
#: The same for inputs of any size: they must be empty.
MUST_BE_EMPTY = ("bad_words_list", "bad_words")


@dataclass(frozen=True)
class Ask:
    """One request. Exactly one of text and token_ids is given.

    exclude_input: leave the prompt out of output_ids. draft_ids: what the client thinks the output begins with.
    """

    text: str | None
    token_ids: list[int] | None
    params: SamplingParams
    streaming: bool = False
    exclude_input: bool = True
    return_perf_metrics: bool = False
    draft_ids: tuple[int, ...] = ()


def read_ask(arrays: Arrays, exclude_input: bool, decode: Callable[[list[int]], str]) -> Ask:
    """The request that these tensors make.

    exclude_input: where the request does not say. decode: text of token ids, for stop words of several tokens.
    Raises UserError when they cannot mean anything, or ask for what the engine does not do.
    """
    check_neutral(arrays)
    text, token_ids = read_prompt(arrays)
    limit = scalar(arrays, "request_output_len", int)
    if limit is None:
        raise UserError(
            "request_output_len is missing", "say how many tokens to generate (max_tokens of the text model)"
        )
    if limit < 1:
        raise UserError(f"request_output_len is {limit}; it must be 1 or more")
    top_k, top_p = scalar(arrays, "runtime_top_k", int), scalar(arrays, "runtime_top_p", float)
    if top_k and top_k > 1 and top_p == 0:
        # As TensorRT-LLM reads it: its clients send 0 for a top_p that is not wanted.
        top_p = None
    stop_ids, stop_texts = read_stop_words(arrays, decode)
    log_probs = scalar(arrays, "num_log_probs", int)
    if log_probs is None and scalar(arrays, "return_log_probs", bool):
        log_probs = 0
    params = SamplingParams(
        max_tokens=limit,
        temperature=scalar(arrays, "temperature", float),
        top_k=top_k,
        top_p=top_p,
        seed=scalar(arrays, "seed", int) or 0,
        repetition_penalty=scalar(arrays, "repetition_penalty", float),
        presence_penalty=scalar(arrays, "presence_penalty", float),
        frequency_penalty=scalar(arrays, "frequency_penalty", float),
        min_tokens=scalar(arrays, "min_tokens", int) or 0,
        end_id=scalar(arrays, "end_id", int),
        stop=stop_texts,
        stop_token_ids=stop_ids,
        logprobs=log_probs,
        return_generation_logits=scalar(arrays, "return_generation_logits", bool) or False,
        add_special_tokens=scalar(arrays, "add_special_tokens", bool) is not False,
        skip_special_tokens=scalar(arrays, "skip_special_tokens", bool) is not False,
    )
    drafts = arrays.get("draft_input_ids")
    excludes = scalar(arrays, "exclude_input_in_output", bool)
    return Ask(
        text,
        token_ids,
        params,
        streaming=scalar(arrays, "streaming", bool) or False,
        exclude_input=exclude_input if excludes is None else excludes,
        return_perf_metrics=scalar(arrays, "return_perf_metrics", bool) or False,
        draft_ids=() if drafts is None or is_empty(drafts) else tuple(drafts.reshape(-1).tolist()),
    )


def asks_to_stop(arrays: Arrays) -> bool:
    """Whether the request is no new one, but ends the running one with the same request id."""
    return bool(scalar(arrays, "stop", bool))


def read_prompt(arrays: Arrays) -> tuple[str | None, list[int] | None]:
    given = [name for name in ("text_input", "input_ids") if name in arrays]
    if len(given) != 1:
        raise UserError("a request needs either input_ids or text_input" + (", not both" if given else ""))
    if given == ["text_input"]:
        texts = strings(arrays, "text_input")
        if len(texts) != 1:
            raise UserError(f"text_input holds {len(texts)} strings; a request is one prompt")
        return texts[0], None
    token_ids: list[int] = arrays["input_ids"].reshape(-1).tolist()
    length = scalar(arrays, "input_lengths", int)
    if length is None:
        return None, token_ids
    if not 1 <= length <= len(token_ids):
        raise UserError(f"input_lengths is {length}, but input_ids holds {len(token_ids)} token(s)")
    return None, token_ids[:length]


def read_stop_words(arrays: Arrays, decode: Callable[[list[int]], str]) -> tuple[list[int], list[str]]:
    """Tokens and strings that end the text. Words of several tokens are looked for in the text."""
    tokens, texts = [], [word for word in strings(arrays, "stop_words") if word]
    for word in id_words(arrays["stop_words_list"]) if "stop_words_list" in arrays else ():
        if len(word) == 1:
            tokens += word
        else:
            texts.append(decode(word))
    return tokens, texts


def id_words(table: np.ndarray) -> list[list[int]]:
    """Words of a list in TensorRT-LLM's form ``[2, n]``: ids of all words in a row, and where each word ends, -1 behind."""
    ids, ends = table.reshape(2, -1).tolist()
    words, start = [], 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(ids):
            raise UserError(
                f"a word list says that a word ends at {end}, after one that ended at {start}, of {len(ids)} ids"
            )
        if (least := min(ids[start:end])) < 0:
            raise UserError(f"a word list holds the token id {least}; ids are 0 or more")
        words.append(ids[start:end])
        start = end
    return words


def check_neutral(arrays: Arrays) -> None:
    """Raises UserError for values that ask for what the engine does not do."""
    for name, values in NEUTRAL.items():
        value = scalar(arrays, name, float)
        if value is not None and value not in values:
            raise UserError(
                f"{name} is {value:g}, which this engine does not do", f"leave it out, or send {values[-1]}"
            )
    for name in MUST_BE_EMPTY:
        if name in arrays and not is_empty(arrays[name]):
            raise UserError(f"{name} holds words or tokens, which this engine does not take", "leave it out")


def is_empty(array: np.ndarray) -> bool:
    """Whether a list has no entry; TensorRT-LLM's clients pad lists that they do not use, with 0, -1 or empty strings."""
    if array.dtype == np.object_:
        return not any(array.reshape(-1).tolist())
    return not bool((array > 0).any())


def scalar(arrays: Arrays, name: str, kind: Callable[[Any], Any]) -> Any:
    """The one value of a tensor as ``kind``; None when it is not there. Raises UserError when it has more or none."""
    if name not in arrays:
        return None
    values = arrays[name].reshape(-1)
    if len(values) != 1:
        raise UserError(f"{name} holds {len(values)} values; it must be one")
    return kind(values[0])


def strings(arrays: Arrays, name: str) -> list[str]:
    """Strings of a tensor; none when it is not there. Raises UserError when they are not UTF-8."""
    found = []
    for value in arrays[name].reshape(-1).tolist() if name in arrays else ():
        try:
            found.append(value.decode() if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError as error:
            raise not_utf8(name, error) from None
    return found
