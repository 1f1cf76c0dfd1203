"""Which token comes next: parameters, and a choice that depends on logits, seed and position alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError

MASK64 = (1 << 64) - 1
#: Stands for the token of logits that are no numbers.
NO_TOKEN = -1
#: Rows that are sampled at once: 64 of 131,072 float64 probabilities are 64 MiB.
ROWS_AT_ONCE = 64
#: Candidates that are found by selection; more are sorted.
MOST_TOP_K = 1024
#: Least values of the parameters that are integers.
LEAST_INTEGERS = {"max_tokens": 1, "min_tokens": 0, "top_k": 0, "seed": 0, "end_id": -1, "logprobs": 0}
#: A penalty beyond this, about a million, would make logits that float32 does not hold. A power of two, so that the bounds
#: stay the same where a server hands a penalty on as float32.
MOST_PENALTY = 2.0**20
#: Least and greatest values of the parameters that are numbers, and the words for them.
NUMBERS = {
    "temperature": (0.0, sys.float_info.max, "0 or more"),
    "top_p": (0.0, 1.0, "0 to 1"),
    "repetition_penalty": (1 / MOST_PENALTY, MOST_PENALTY, "above 0: a millionth to a million"),
    "presence_penalty": (-MOST_PENALTY, MOST_PENALTY, "minus a million to a million"),
    "frequency_penalty": (-MOST_PENALTY, MOST_PENALTY, "minus a million to a million"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued; names as in TensorRT-LLM. By default greedily.

    max_tokens: most tokens to generate.
    temperature: divides the logits; None for 1, 0 for greedy. top_k: only the k likeliest tokens; None or 0 for all.
    top_p: only the likeliest tokens that together reach this probability; None or 1 for all, 0 for greedy.
    seed: of the random numbers; the same seed, prompt and engine give the same text in any batch.
    repetition_penalty: above 1 makes tokens of the prompt and the output so far less likely, None or 1 leaves them alone.
        presence_penalty, frequency_penalty: above 0 make tokens of the output less likely, once or by their number, None or 0
        leave them alone. See runtime.penalties for the formulas.
    min_tokens: fewest tokens to generate: end tokens cannot be chosen before, and stop strings do not count.
    end_id: token that ends the text; None for those of the checkpoint, -1 for none.
    stop: strings that end the text, which is cut off before them. stop_token_ids: further tokens that end it.
    ignore_eos: go on after the end token. return_generation_logits: keep the logits of each token's place.
    logprobs: keep the log-probability of each token, and of so many of the likeliest in its place; None for none. Both are
        the model's own, before penalties, temperature, top_k and top_p.
    add_special_tokens, skip_special_tokens: of the tokenizer, when it reads the prompt and writes the text.

    Raises UserError when a value makes no sense.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int = 0
    end_id: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    return_generation_logits: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, least in LEAST_INTEGERS.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UserError(f"{name} is {value!r}; it must be an integer, {least} or more")
        for name, (low, high, words) in NUMBERS.items():
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise UserError(f"{name} is {value!r}; it must be a number, {words}")
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if not all(isinstance(word, str) and word for word in self.stop_words):
            raise UserError(f"stop is {self.stop!r}; it must be strings that are not empty")
        if not all(type(token) is int and token >= 0 for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids are {list(self.stop_token_ids)!r}; they must be token ids")

    @property
    def stop_words(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty depends on what was read and said."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty not in (None, 1) or any(value not in (None, 0) for value in penalties)

    @property
    def greedy(self) -> bool:
        """The likeliest token is always taken, penalties counted in."""
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


def mask_padding(logits: Tensor, num_tokens: int | None, in_place: bool = False) -> Tensor:
    """Logits ``[..., vocab]`` with -inf at ids that only pad the embedding (``num_tokens`` and above)."""
    if num_tokens is None or num_tokens >= logits.shape[-1]:
        return logits
    masked = logits if in_place else logits.clone()
    masked[..., num_tokens:] = -math.inf
    return masked


def choose(logits: Tensor, params: SamplingParams, position: int, purpose: Purpose = "token") -> int:
    """The token after ``position`` tokens: logits ``[vocab]`` float32, padding ids at -inf."""
    if params.greedy:
        return int(logits.argmax())
    return int(draw(logits[None], [params], [uniform(params.seed, position, purpose)])[0])


def choose_all(logits: Tensor, rows: Mapping[int, tuple[SamplingParams, int]]) -> Tensor:
    """What ``choose`` takes after each token of a step, int64 ``[rows, T]``: logits ``[rows, T, vocab]``, padding ids at -inf.

    rows: parameters of a row, and the position of its first token; other rows get their likeliest tokens. NO_TOKEN where the
    logits are no numbers. The host waits for nothing.
    """
    best, length = likeliest(logits), logits.shape[1]
    tokens = best.clone()
    sampled = {row: given for row, given in rows.items() if not given[0].greedy}
    if sampled:
        places = to_device(list(sampled), torch.long, logits.device)
        params = [given for given, _ in sampled.values() for _ in range(length)]
        shares = [uniform(p.seed, start + i) for p, start in sampled.values() for i in range(length)]
        drawn = draw(logits.index_select(0, places).flatten(0, 1), params, shares)
        tokens.index_copy_(0, places, drawn.view(-1, length))
    return tokens.masked_fill_(best == NO_TOKEN, NO_TOKEN)


def likeliest(logits: Tensor) -> Tensor:
    """int64 ``[...]``, the likeliest tokens of logits ``[..., vocab]``; NO_TOKEN where one of these is NaN, or infinite."""
    tokens = logits.argmax(-1)
    # NaN is the largest of all to argmax, so that no second look at the logits is needed.
    return tokens.masked_fill_(~logits.gather(-1, tokens[..., None])[..., 0].isfinite(), NO_TOKEN)


def draw(logits: Tensor, params: Sequence[SamplingParams], shares: Sequence[float]) -> Tensor:
    """One token for each row of logits ``[n, vocab]``, int64 ``[n]``; a row's token does not depend on the others.

    shares: where in the cumulated probabilities of its candidates each is, in [0, 1). Candidates stand in the order of their
    probability where top_k or top_p need it, and by their id otherwise.
    """
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    ordered = [i for i, p in enumerate(params) if p.top_k or (p.top_p is not None and p.top_p < 1)]
    plain = sorted(set(range(len(params))) - set(ordered))
    for group, candidates_of in ((plain, all_tokens), (ordered, likely_tokens)):
        for start in range(0, len(group), ROWS_AT_ONCE):
            rows = group[start : start + ROWS_AT_ONCE]
            places = to_device(rows, torch.long, logits.device)
            share = to_device([shares[row] for row in rows], torch.double, logits.device)
            weights, ids = candidates_of(logits.index_select(0, places), [params[row] for row in rows])
            found = picked(weights, share[:, None])
            tokens.index_copy_(0, places, found if ids is None else ids.gather(1, found[:, None])[:, 0])
    return tokens


def scaled_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Float64 ``[n, vocab]``: each row's probabilities at its temperature."""
    temperatures = [1.0 if p.temperature is None else p.temperature for p in params]
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    shifted = logits.double() - logits.amax(-1, keepdim=True).double()
    return (shifted / to_device(temperatures, torch.double, logits.device)[:, None]).softmax(-1)


def all_tokens(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, None]:
    return scaled_probabilities(logits, params), None


def likely_tokens(logits: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Float64 weights ``[n, candidates]``, the likeliest first, 0 for those that the parameters leave out; and their ids."""
    size, device = logits.shape[-1], logits.device
    limits = [min(p.top_k or size, size) for p in params]
    tokens = likeliest_first(logits, max(limits))
    probabilities = scaled_probabilities(logits, params).gather(1, tokens)
    before = probabilities.cumsum(-1) - probabilities
    # A token is kept while those before it have not reached top_p, so that there is always one.
    top_p = to_device([math.inf if p.top_p is None else p.top_p for p in params], torch.double, device)
    kept = (before < top_p[:, None]) & (
        torch.arange(tokens.shape[1], device=device) < to_device(limits, torch.long, device)[:, None]
    )
    return probabilities * kept, tokens


def likeliest_first(logits: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` highest of float32 logits ``[n, vocab]``; of equal ones the lower id comes first."""
    bits = logits.float().contiguous().view(torch.int32)
    # As integers negative floats are ordered backwards. Below them the id makes every key unlike all others.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[-1] - 1
    keys = (ordered << 32) | (last - torch.arange(last + 1, device=logits.device))
    highest = keys.topk(count, -1).values if count <= MOST_TOP_K else keys.sort(-1, descending=True).values[..., :count]
    return last - (highest & 0xFFFFFFFF)


def picked(weights: Tensor, share: Tensor) -> Tensor:
    """The index at which each row's running sum of weights ``[n, candidates]`` passes ``share`` ``[n, 1]`` of their total."""
    reached = weights.cumsum(-1)
    total = reached[..., -1:]
    # The second condition matters only where the product is rounded up to the total.
    return ((reached <= share * total) & (reached < total)).sum(-1)


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Float64 ``[vocab]``: the probability with which ``choose`` takes each token, for parameters that are not greedy."""
    weights, tokens = likely_tokens(logits[None], [params])
    return weights.new_zeros(logits.shape[-1]).scatter_(0, tokens[0], (weights / weights.sum())[0])


def pick(weights: Tensor, share: float) -> int:
    """``picked`` of one row of weights ``[candidates]``."""
    return int(picked(weights[None], weights.new_full((1, 1), share))[0])


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values ``[n]``, without waiting for a GPU."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
