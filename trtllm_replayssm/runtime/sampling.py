"""Which token comes next: parameters, and a choice that depends on logits, seed and position alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtllm_replayssm.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued; names as in TensorRT-LLM. By default greedily.

    max_tokens: most tokens to generate.
    temperature: divides the logits; None for 1, 0 for greedy. top_k: only the k likeliest tokens; None or 0 for all.
    top_p: only the likeliest tokens that together reach this probability; None or 1 for all, 0 for greedy.
    seed: of the random numbers; the same seed, prompt and engine give the same text in any batch.
    end_id: token that ends the text; None for those of the checkpoint, -1 for none.
    stop: strings that end the text, which is cut off before them. stop_token_ids: further tokens that end it.
    ignore_eos: go on after the end token. return_generation_logits: keep the logits each token was chosen from.
    logprobs: keep the log-probability of each token, and of so many of the likeliest in its place; None for none. They are
        the model's own, before temperature, top_k and top_p.
    add_special_tokens, skip_special_tokens: of the tokenizer, when it reads the prompt and writes the text.

    Raises UserError when a value makes no sense.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    end_id: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    return_generation_logits: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, low in (("max_tokens", 1), ("top_k", 0), ("seed", 0), ("end_id", -1), ("logprobs", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise UserError(f"{name} is {value!r}; it must be an integer, {low} or more")
        for name, high in (("temperature", math.inf), ("top_p", 1.0)):
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not 0 <= value <= high:
                limit = "0 or more" if math.isinf(high) else "0 to 1"
                raise UserError(f"{name} is {value!r}; it must be a number, {limit}")
        if not all(isinstance(word, str) and word for word in self.stop_words):
            raise UserError(f"stop is {self.stop!r}; it must be strings that are not empty")
        if not all(type(token) is int and token >= 0 for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids are {list(self.stop_token_ids)!r}; they must be token ids")

    @property
    def stop_words(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """The likeliest token is always taken."""
        given = (self.temperature, self.top_k, self.top_p)
        return all(value is None for value in given) or self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    def end_ids(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """Tokens that end the text, given those of the checkpoint."""
        own = eos_token_ids if self.end_id is None else [] if self.end_id == -1 else [self.end_id]
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else own)


#: What a random number is for; numbers of different purposes have nothing to do with each other.
Purpose = Literal["token", "draft", "accept", "residual"]
PURPOSES: tuple[Purpose, ...] = ("token", "draft", "accept", "residual")


def uniform(seed: int, position: int, purpose: Purpose = "token") -> float:
    """A number in [0, 1) that looks random and depends on nothing but its arguments (SplitMix64's output function)."""
    state = seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15
    state = (state + PURPOSES.index(purpose) * 0xDA942042E4DD58B5) & MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return ((state ^ (state >> 31)) >> 11) / (1 << 53)


def mask_padding(logits: Tensor, num_tokens: int | None) -> Tensor:
    """Logits ``[..., vocab]`` with -inf at ids that only pad the embedding (``num_tokens`` and above)."""
    if num_tokens is None or num_tokens >= logits.shape[-1]:
        return logits
    masked = logits.clone()
    masked[..., num_tokens:] = -math.inf
    return masked


def choose(logits: Tensor, params: SamplingParams, position: int, purpose: Purpose = "token") -> int:
    """The token after ``position`` tokens: logits ``[vocab]`` float32, padding ids at -inf."""
    if params.greedy:
        return int(logits.argmax())
    probabilities, tokens = candidates(logits, params)
    return int(tokens[pick(probabilities, uniform(params.seed, position, purpose))])


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Float64 weights of the tokens, likeliest first, and the tokens; 0 for those that the parameters leave out."""
    temperature = 1.0 if params.temperature is None else params.temperature
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (logits.double() - logits.max().double()) / temperature
    probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities > 0
    if params.top_k:
        kept[params.top_k :] = False
    if params.top_p is not None:
        # A token is kept while those before it have not reached top_p, so that there is always one.
        kept &= before < params.top_p
    return probabilities * kept, tokens


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Float64 ``[vocab]``: the probability with which ``choose`` takes each token, for parameters that are not greedy."""
    weights, tokens = candidates(logits, params)
    return weights.new_zeros(weights.shape).scatter_(0, tokens, weights / weights.sum())


def pick(weights: Tensor, share: float) -> int:
    """The index at which the running sum of the weights passes ``share`` (in [0, 1)) of their total."""
    reached = weights.cumsum(-1)
    # The second condition matters only where the product is rounded up to the total.
    return int(((reached <= share * reached[-1]) & (reached < reached[-1])).sum())
