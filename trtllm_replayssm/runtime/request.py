"""One prompt on its way to a text: what was generated, what of it may be shown, and when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.outputs import CompletionOutput, FinishReason, Logprob, RequestId
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics
from trtllm_replayssm.runtime.tokenizer import TextStream

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.engine import Engine

log = logging.getLogger(__name__)


class Request:
    """One prompt on its way.

    limit: tokens to generate. tokens: those that were; the first ``told`` of them were dealt with. history: prompt and tokens.
    stream: decodes tokens; None without a tokenizer. text: what is
    certain so far; its first ``sent`` characters were handed out, the rest may be the beginning of a stop string.
    drafts: what the caller thinks will be generated, cut off before the first token that turned out to be another one.
    cached_tokens: prompt tokens that came from the prefix cache. name: what messages call the prompt.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt: list[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        stream: TextStream | None,
        drafts: Sequence[int] = (),
        name: str | None = None,
    ) -> None:
        """name: by default ``prompt`` and its id."""
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.name = name or f"prompt {request_id}"
        self.end_ids, self.stream = end_ids, stream
        self.limit = params.max_tokens
        self.history = list(prompt)
        self.tokens: list[int] = []
        self.told = 0
        self.drafts = tuple(drafts)
        self.logits: list[Tensor] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.text, self.sent = "", 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.statistics = SpeculationStatistics()

    @property
    def position(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.history)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - len(self.tokens)

    def next_drafts(self, count: int) -> tuple[int, ...]:
        """Up to ``count`` of the caller's drafts that are still to be verified."""
        place = len(self.tokens)
        return self.drafts[place : place + count]

    @property
    def keeps_logits(self) -> bool:
        """Whether ``tell`` is given something of the logits of a token's place."""
        return self.params.return_generation_logits or self.params.logprobs is not None

    def append(self, token: int) -> bool:
        """Add a token; whether it ends the text, unless ``tell`` finds that an earlier one has."""
        place = len(self.tokens)
        if self.drafts[place : place + 1] != (token,):
            self.drafts = self.drafts[:place]
        self.tokens.append(token)
        self.history.append(token)
        return token in self.end_ids or self.remaining == 0

    def tell(self, logits: Tensor | None = None, logprobs: dict[int, Logprob] | None = None) -> str:
        """Deal with the next token that was added; returns text that may be shown. Sets finish_reason.

        logits: ``[vocab]`` on the host, logprobs: by token, both of its place, where the parameters ask for them. What was
        added behind a token that ends the text is taken back.
        """
        token = self.tokens[self.told]
        self.told += 1
        if logits is not None:
            self.logits.append(logits)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.told == self.limit:
            self.finish_reason = "length"
        if self.stream is not None:
            self.extend(self.stream.push(token))
            if self.finish_reason is not None and not isinstance(self.stop_reason, str):
                self.extend(self.stream.finish())
        if self.finish_reason is not None:
            del self.tokens[self.told :]
            del self.history[len(self.prompt) + self.told :]
        return self.shown()

    def cancel(self) -> str:
        """End the request where it stands, all of its tokens told; returns text that was held back."""
        self.finish_reason = "cancelled"
        if self.stream is not None:
            self.text += self.stream.finish()
        return self.shown()

    def shown(self) -> str:
        """Text that was not handed out yet and may be."""
        shown = len(self.text) - (self.held_back() if self.finish_reason is None else 0)
        piece = self.text[self.sent : shown]
        self.sent = max(self.sent, shown)
        return piece

    def extend(self, piece: str) -> None:
        """Add text, and cut it off before the first stop string, unless it is too early to end."""
        before, self.text = len(self.text), self.text + piece
        if self.told < self.params.min_tokens:
            return
        found = []
        for word in self.params.stop_words:
            at = self.text.find(word, max(0, before - len(word) + 1))
            found += [(at, word)] if at >= 0 else []
        if found:
            at, word = min(found)
            self.text = self.text[:at]
            self.finish_reason, self.stop_reason = "stop", word

    def held_back(self) -> int:
        """Characters at the end of the text that may turn out to begin a stop string."""
        longest = 0
        for word in self.params.stop_words:
            for length in range(1, min(len(word) - 1, len(self.text)) + 1):
                if self.text.endswith(word[:length]):
                    longest = max(longest, length)
        return longest

    def output(self) -> CompletionOutput:
        """What was generated. The request must have ended."""
        assert self.finish_reason is not None
        total = None
        if self.params.logprobs is not None:
            total = sum(found[token].logprob for token, found in zip(self.tokens, self.logprobs))
        return CompletionOutput(
            index=0,
            text=self.text,
            token_ids=self.tokens,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            generation_logits=torch.stack(self.logits) if self.logits else None,
            logprobs=None if total is None else self.logprobs,
            cumulative_logprob=total,
        )


def check_request(engine: Engine, request: Request) -> None:
    """Raises UserError for a prompt that cannot be run; limits the output to what the slot has room for."""
    config, which = engine.config, request.name
    known = config.checkpoint.num_tokens or engine.decoder.vocab_size
    if not request.prompt:
        raise UserError(f"{which} is empty", "a prompt needs at least one token")
    for kind, tokens in ((which, request.prompt), (f"the draft of {which}", request.drafts)):
        for token in tokens:
            if type(token) is not int or not 0 <= token < known:
                raise UserError(f"{kind} holds token id {token!r}; the model has ids 0 to {known - 1}")
    if request.drafts and config.replay.max_draft_len == 0:
        raise UserError(
            f"{which} has a draft, and the engine was built without room for drafts (max_draft_len 0)",
            "leave the draft out, or build the engine with --max_draft_len 3, for example",
        )
    for token in (request.params.end_id or 0, *request.params.stop_token_ids):
        if token >= known:
            raise UserError(f"end token {token} does not exist; the model has ids 0 to {known - 1}")
    if request.params.min_tokens and len(request.end_ids) >= known:
        raise UserError("every token ends the text, so that min_tokens cannot be reached")
    room = config.max_seq_len - len(request.prompt)
    if room < 1:
        raise UserError(
            f"{which} has {len(request.prompt)} tokens; max_seq_len {config.max_seq_len} leaves no room for output",
            "shorten it, or build the engine with a larger --max_seq_len",
        )
    if request.limit > room:
        log.warning("%s: output is limited to %d tokens by max_seq_len %d", which, room, config.max_seq_len)
        request.limit = room
    if request.params.stop_words and request.stream is None:
        raise UserError("stop strings need a tokenizer, and the engine has none", "use stop_token_ids or end_id")
