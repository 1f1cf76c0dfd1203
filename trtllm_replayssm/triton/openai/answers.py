"""Answers in OpenAI's form, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_replayssm.triton.openai.backend import Piece

Json = dict[str, Any]
#: Text of one token.
TokenText = Callable[[int], str]


class Form(ABC):
    """The form of one answer: its head, and how a piece of text stands in it."""

    id_prefix: str
    whole: str
    part: str

    def __init__(self, model: str, token_text: TokenText, logprobs: bool) -> None:
        self.token_text, self.logprobs = token_text, logprobs
        self.head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def answer(self, pieces: Sequence[Piece], usage: Json) -> Json:
        """The whole answer: one piece per choice."""
        choices = [self.choice(i, piece) for i, piece in enumerate(pieces)]
        return {**self.head, "object": self.whole, "choices": choices, "usage": usage}

    def chunk(self, index: int, piece: Piece) -> Json:
        """What a stream says of one piece of one choice."""
        return {**self.head, "object": self.part, "choices": [self.delta(index, piece)]}

    def usage_chunk(self, usage: Json) -> Json:
        """The last one of a stream that was asked for usage."""
        return {**self.head, "object": self.part, "choices": [], "usage": usage}

    def opening(self, index: int) -> Json | None:
        """What a stream says before a choice's first piece."""
        return None

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> Json: ...

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> Json: ...


class Completion(Form):
    id_prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, piece: Piece) -> Json:
        finish, logprobs = piece.finish_reason or None, self.places(piece) if self.logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}

    delta = choice

    def places(self, piece: Piece) -> Json:
        """Log-probabilities as /v1/completions gives them: lists of equal length. Offsets are of this piece's tokens."""
        tokens = [self.token_text(token) for token in piece.token_ids]
        top = [
            {self.token_text(other): value for other, value in likeliest} | {token: own}
            for token, own, likeliest in zip(tokens, piece.logprobs, piece.top or [[]] * len(tokens))
        ]
        offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
        return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": top, "text_offset": offsets}


class Chat(Form):
    id_prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self.head, "object": self.part, "choices": [choice]}

    def choice(self, index: int, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self.end(piece)}

    def delta(self, index: int, piece: Piece) -> Json:
        return {"index": index, "delta": {"content": piece.text} if piece.text else {}, **self.end(piece)}

    def end(self, piece: Piece) -> Json:
        logprobs = {"content": self.places(piece)} if self.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason or None}

    def places(self, piece: Piece) -> list[Json]:
        return [
            self.place(token, own) | {"top_logprobs": [self.place(other, value) for other, value in likeliest]}
            for token, own, likeliest in zip(piece.token_ids, piece.logprobs, piece.top or [[]] * len(piece.token_ids))
        ]

    def place(self, token: int, logprob: float) -> Json:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def joined(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].finish_reason,
        [value for piece in pieces for value in piece.logprobs],
        [place for piece in pieces for place in piece.top],
    )


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
