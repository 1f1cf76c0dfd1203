"""What generation gives back; names as in TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    text: empty without a tokenizer; ends before a stop string. token_ids: everything that was generated, an end token
    included. finish_reason: ``stop`` after an end token or a stop string, else ``length``; stop_reason: that token or string.
    generation_logits: float32 ``[tokens, vocab]`` from which the tokens were chosen, where asked for; padding ids are -inf.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    generation_logits: Tensor | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt. request_id: its place among the prompts. prompt: None when it was given as ids."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
