"""What generation gives back; names as in TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

RequestId = int | str
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token in its place, and its rank there: 1 for the likeliest."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    text: empty without a tokenizer; ends before a stop string. token_ids: everything that was generated, an end token
    included. finish_reason: ``stop`` after an end token or a stop string, ``cancelled`` by the caller, else ``length``;
    stop_reason: that token or string.
    generation_logits: float32 ``[tokens, vocab]`` from which the tokens were chosen, where asked for; padding ids are -inf.
    logprobs: by token id in every place, where asked for; cumulative_logprob: of the whole continuation.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    generation_logits: Tensor | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt.

    request_id: its place among the prompts. prompt: None when it was given as ids. cached_tokens: prompt tokens that came from
    the prefix cache.
    """

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    cached_tokens: int = 0


@dataclass(frozen=True)
class Update:
    """What became of a request since its last update.

    token_ids: new tokens. text: what may be shown now. output: all of it, when the request has ended as it should or was
    cancelled. error: why it had to end, otherwise.
    """

    request_id: RequestId
    token_ids: list[int]
    text: str
    output: CompletionOutput | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.output is not None or self.error is not None
