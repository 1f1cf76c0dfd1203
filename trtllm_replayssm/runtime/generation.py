"""The loop that turns prompts into tokens: requests take slots, prefill, decode together, and leave."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.outputs import CompletionOutput, FinishReason
from trtllm_replayssm.runtime.sampling import SamplingParams, choose, mask_padding
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tokenizer import TextStream

log = logging.getLogger(__name__)

#: Called with a request's id and the text that became certain.
OnText = Callable[[int, str], None]


class Request:
    """One prompt on its way.

    limit: tokens to generate. stream: decodes them; None without a tokenizer. text: what is certain so far; its first
    ``sent`` characters were handed out, the rest may be the beginning of a stop string.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        stream: TextStream | None,
    ) -> None:
        self.request_id, self.prompt, self.params, self.end_ids, self.stream = (
            request_id,
            prompt,
            params,
            end_ids,
            stream,
        )
        self.limit = params.max_tokens
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        self.text, self.sent = "", 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def position(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    def take(self, token: int, logits: Tensor) -> str:
        """Add a token and the logits ``[vocab]`` it was chosen from; returns text that may be shown. Sets finish_reason."""
        self.tokens.append(token)
        if self.params.return_generation_logits:
            self.logits.append(logits.cpu().clone())
        if token in self.end_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"
        if self.stream is not None:
            self.extend(self.stream.push(token))
            if self.finish_reason is not None and not isinstance(self.stop_reason, str):
                self.extend(self.stream.finish())
        shown = len(self.text) - (self.held_back() if self.finish_reason is None else 0)
        piece = self.text[self.sent : shown]
        self.sent = max(self.sent, shown)
        return piece

    def extend(self, piece: str) -> None:
        """Add text, and cut it off before the first stop string."""
        before, self.text = len(self.text), self.text + piece
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
        assert self.finish_reason is not None
        logits = torch.stack(self.logits) if self.logits else None
        return CompletionOutput(0, self.text, self.tokens, self.finish_reason, self.stop_reason, logits)


def generate(session: Session, requests: Sequence[Request], on_text: OnText = lambda request_id, text: None) -> None:
    """Run the requests until each has a finish_reason. Slots that were in use are taken over.

    A request's tokens do not depend on the others: its prompt is cut where the build says, and tokens are chosen by its own
    seed and position. Raises UserError, before anything runs, for prompts that do not fit.
    """
    for request in requests:
        check_request(session, request)
    waiting = deque(requests)
    running: dict[int, Request] = {}
    while waiting or running:
        admitted = {}
        for slot in range(session.max_batch_size):
            if waiting and slot not in running:
                admitted[slot] = waiting.popleft()
                session.admit(slot)
        if admitted:
            logits = prefill(session, {slot: request.prompt for slot, request in admitted.items()})
            running |= admitted
        else:
            logits = decode(session, {slot: request.tokens[-1] for slot, request in running.items()})
        for slot, token in sample(session, {slot: running[slot] for slot in logits}, logits).items():
            request = running[slot]
            if text := request.take(token, logits[slot]):
                on_text(request.request_id, text)
            if request.finish_reason is not None:
                del running[slot]


def check_request(session: Session, request: Request) -> None:
    """Raises UserError for a prompt that cannot be run; limits the output to what the slot has room for."""
    config, which = session.engine.config, f"prompt {request.request_id}"
    known = config.checkpoint.num_tokens or session.engine.decoder.vocab_size
    if not request.prompt:
        raise UserError(f"{which} is empty", "a prompt needs at least one token")
    for token in request.prompt:
        if type(token) is not int or not 0 <= token < known:
            raise UserError(f"{which} holds token id {token!r}; the model has ids 0 to {known - 1}")
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


def prefill(session: Session, prompts: dict[int, list[int]]) -> dict[int, Tensor]:
    """Run the prompts of freshly admitted slots; returns the logits ``[vocab]`` after each prompt."""
    chunk = session.engine.config.prefill_chunk
    results: dict[int, Tensor] = {}
    left = dict(prompts)
    while left:
        pieces = {slot: tokens[:chunk] for slot, tokens in left.items()}
        logits = step(session, pieces, RowMode.ABSORB)
        results |= {slot: logits[slot] for slot, tokens in left.items() if len(tokens) <= chunk}
        left = {slot: tokens[chunk:] for slot, tokens in left.items() if len(tokens) > chunk}
    return results


def decode(session: Session, tokens: dict[int, int]) -> dict[int, Tensor]:
    """Append one token to each slot; returns the logits ``[vocab]`` after it."""
    return step(session, {slot: [token] for slot, token in tokens.items()}, RowMode.DECODE)


def step(session: Session, pieces: dict[int, list[int]], mode: RowMode) -> dict[int, Tensor]:
    """One step and its commit for any set of slots, which may have gaps; returns the last logits ``[vocab]`` of each."""
    first, rows = min(pieces), max(pieces) - min(pieces) + 1
    ids = torch.zeros(rows, max(map(len, pieces.values())), dtype=torch.int32)
    lengths = [len(pieces.get(first + row, ())) for row in range(rows)]
    for slot, piece in pieces.items():
        ids[slot - first, : len(piece)] = torch.tensor(piece)
    active = [length > 0 for length in lengths]
    logits = session.step(ids, first, [max(1, n) for n in lengths], [mode] * rows, active, last_only=True)
    session.commit(first, lengths)
    masked = mask_padding(logits[:, 0], session.engine.config.checkpoint.num_tokens)
    return {slot: masked[slot - first] for slot in pieces}


def sample(session: Session, requests: dict[int, Request], logits: dict[int, Tensor]) -> dict[int, int]:
    """The next token of each slot; all ranks of a group take rank 0's choice."""
    tokens = [choose(logits[slot], request.params, request.position) for slot, request in requests.items()]
    if session.engine.group is not None:
        chosen = torch.tensor(tokens, device=session.engine.device)
        dist.broadcast(chosen, 0, group=session.engine.group)
        tokens = chosen.tolist()
    return dict(zip(requests, tokens))
