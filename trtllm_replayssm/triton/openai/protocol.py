"""Requests in OpenAI's form: read, checked, and made into sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.sampling import MASK64, SamplingParams
from trtllm_replayssm.runtime.tokenizer import check_unicode

Json = dict[str, Any]
Reader = Callable[[Any], bool]

#: OpenAI's own default for completions; chats go on for as long as there is room.
DEFAULT_MAX_TOKENS = 16
#: Most continuations of all prompts of a request, stop strings, and likeliest tokens that are listed.
MAX_CHOICES, MAX_STOPS, MAX_LOGPROBS = 64, 16, 20
#: OpenAI's bounds of presence_penalty and frequency_penalty.
MAX_PENALTY = 2.0
#: What Triton's tensors can hold of a temperature.
FLOAT32_MAX = 3.4e38


def is_int(low: int, high: int | None = None) -> Reader:
    return lambda value: type(value) is int and low <= value and (high is None or value <= high)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_temperature(value: Any) -> bool:
    return is_number(value) and not value < 0 and not value > FLOAT32_MAX


def is_penalty(value: Any) -> bool:
    return is_number(value) and -MAX_PENALTY <= value <= MAX_PENALTY


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_strings(value: Any) -> bool:
    many = [value] if isinstance(value, str) else value
    return isinstance(many, list) and len(many) <= MAX_STOPS and all(isinstance(text, str) and text for text in many)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token) is int for token in value)


def is_prompt(value: Any) -> bool:
    """Text, token ids, or a list of either."""
    if isinstance(value, str) or is_ids(value):
        return True
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) or is_ids(item) for item in value)


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)


def is_stream_options(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"include_usage"} and all(map(is_bool, value.values()))


def is_one_of(*values: Any) -> Reader:
    return lambda value: any(value == known and type(value) is type(known) for known in values)


#: Keys of both kinds of request: what their values must be, and the words for it.
SHARED: dict[str, tuple[Reader, str]] = {
    "model": (lambda value: isinstance(value, str), "a string"),
    "max_tokens": (is_int(1), "an integer, 1 or more"),
    "temperature": (is_temperature, "a number, 0 or more"),
    "top_p": (is_number, "a number"),
    "top_k": (is_int(-1, (1 << 31) - 1), "an integer, 0 or -1 for all tokens"),
    "seed": (is_int(0, MASK64), "an integer of 64 bits, 0 or more"),
    "n": (is_int(1, MAX_CHOICES), f"an integer, 1 to {MAX_CHOICES}"),
    "stop": (is_strings, f"a string, or a list of at most {MAX_STOPS}, none of them empty"),
    "stop_token_ids": (is_ids, "a list of token ids"),
    "ignore_eos": (is_bool, "true or false"),
    "stream": (is_bool, "true or false"),
    "stream_options": (is_stream_options, 'an object like {"include_usage": true}'),
    "presence_penalty": (is_penalty, f"a number, {-MAX_PENALTY:g} to {MAX_PENALTY:g}"),
    "frequency_penalty": (is_penalty, f"a number, {-MAX_PENALTY:g} to {MAX_PENALTY:g}"),
    # Not OpenAI's, but what its clients send to engines of one's own.
    "repetition_penalty": (is_number, "a number"),
    "min_tokens": (is_int(0, (1 << 31) - 1), "an integer, 0 or more"),
    # Only with the values that change nothing.
    "logit_bias": (is_one_of({}), "empty: this engine has no biases"),
}
COMPLETION = SHARED | {
    "prompt": (is_prompt, "text, token ids, or a list of either"),
    "logprobs": (is_int(0, MAX_LOGPROBS), f"an integer, 0 to {MAX_LOGPROBS}"),
    "echo": (is_one_of(False), "false: prompts are not echoed"),
    "suffix": (is_one_of(""), "empty: there is no infilling"),
    "best_of": (is_int(1, 1), "1: continuations are not ranked"),
}
CHAT = SHARED | {
    "messages": (is_messages, "a list of messages"),
    "max_completion_tokens": (is_int(1), "an integer, 1 or more"),
    "logprobs": (is_bool, "true or false"),
    "top_logprobs": (is_int(0, MAX_LOGPROBS), f"an integer, 0 to {MAX_LOGPROBS}"),
    "tools": (is_one_of([]), "empty: tools are not supported"),
    "tool_choice": (is_one_of("none", "auto"), "none: tools are not supported"),
    "response_format": (is_one_of({"type": "text"}), 'text: {"type": "text"}'),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
}
#: Keys that change nothing here, whatever they say.
IGNORED = {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, prompts apart.

    params: of the first continuation of a prompt; the next ones take the following seeds. max_tokens: None for as many as
    there is room for. include_usage: of a stream, in a last chunk.
    """

    params: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool


def check_keys(body: Any, known: Mapping[str, tuple[Reader, str]], needed: str) -> Json:
    """The keys that are set. Raises UserError for what is unknown or cannot be: it would not do what was asked."""
    if not isinstance(body, dict):
        raise UserError("the body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None and key not in IGNORED}
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{key} is not supported")
        fits, words = known[key]
        if not fits(value):
            raise UserError(f"{key} must be {words}")
    if needed not in given:
        raise UserError(f"{needed} is missing")
    return given


def wanted(given: Json, default_max_tokens: int | None, logprobs: int | None, seed: int) -> Wanted:
    """seed: where the request has none. Raises UserError for values out of range."""
    limit = given.get("max_completion_tokens", given.get("max_tokens", default_max_tokens))
    top_k = given.get("top_k")
    params = SamplingParams(
        # Where there is no limit, it is known with the prompt.
        max_tokens=limit or max(1, given.get("min_tokens", 0)),
        # OpenAI's default, where the engine's own is greedy.
        temperature=given.get("temperature", 1.0),
        top_k=None if top_k == -1 else top_k,
        top_p=given.get("top_p"),
        seed=given.get("seed", seed),
        repetition_penalty=given.get("repetition_penalty"),
        presence_penalty=given.get("presence_penalty"),
        frequency_penalty=given.get("frequency_penalty"),
        min_tokens=given.get("min_tokens", 0),
        stop=given.get("stop"),
        stop_token_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        logprobs=logprobs,
    )
    for word in params.stop_words:
        check_unicode(word, "stop")
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise UserError("stream_options is only for streams")
    return Wanted(params, limit, given.get("n", 1), stream, given.get("stream_options", {}).get("include_usage", False))


def prompts_of(given: Json) -> list[str | list[int]]:
    """The prompts of a completion request."""
    prompt = given["prompt"]
    return [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt


def chat_logprobs(given: Json) -> int | None:
    """How many of the likeliest tokens to list; None for no log-probabilities."""
    if not given.get("logprobs", False):
        if given.get("top_logprobs"):
            raise UserError("top_logprobs needs logprobs true")
        return None
    return int(given.get("top_logprobs", 0))
