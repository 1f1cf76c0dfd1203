"""What a request has read and said already makes tokens less likely, or more: penalties, and the least length of a text.

Token by token, with float32 logits x, in this order:

* repetition_penalty r, of tokens in the prompt or the output so far: ``x * r`` where x is negative, else ``x / r``, as in
  transformers (and Keskar et al., 2019, section 4.1);
* frequency_penalty f and presence_penalty p, of tokens that the output holds c > 0 times: ``x - c f - p``, OpenAI's
  definition, which does not look at the prompt;
* end tokens are impossible before min_tokens.

Temperature, top_k and top_p come after that. A step that verifies drafts judges each of its places as if the drafts before
it had been taken, because only then does the place count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import ROWS_AT_ONCE, SamplingParams, to_device


class Penalties:
    """Tables of the tokens of those slots whose requests are penalised for them, on the device.

    said: int32 ``[rows, vocab]``, how often the output holds each token; read: bool ``[rows, vocab]``, whether the prompt
    does. They have as many rows as such requests have ever run at the same time, rounded up to a power of two.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.said = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.read = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        #: Rows of the tables by slot, and those that no slot has.
        self.rows: dict[int, int] = {}
        self.free: list[int] = []

    def place(self, slot: int, request: Request) -> None:
        """The slot belongs to this request from now on, which may have said something already."""
        self.release(slot)
        if not request.params.counts_tokens:
            return
        if not self.free:
            self.grow()
        row = self.rows[slot] = self.free.pop()
        self.said[row], self.read[row] = 0, False
        self.read[row].index_fill_(0, to_device(request.prompt, torch.long, self.read.device), True)
        if request.tokens:
            self.count([slot] * len(request.tokens), to_device(request.tokens, torch.long, self.said.device))

    def release(self, slot: int) -> None:
        """The slot's tokens count no more, those of steps under way included."""
        if (row := self.rows.pop(slot, None)) is not None:
            self.free.append(row)

    def grow(self) -> None:
        """Twice as many rows."""
        held, vocab = self.said.shape
        more = max(1, held)
        said, read = (torch.cat([table, table.new_zeros(more, vocab)]) for table in (self.said, self.read))
        self.said, self.read = said, read
        self.free += range(held, held + more)

    def count(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Each of these slots has said the token in its place: int64 ``[n]`` on the device; a slot may occur repeatedly."""
        counted = [i for i, slot in enumerate(slots) if slot in self.rows]
        if not counted:
            return
        chosen = tokens if len(counted) == len(slots) else tokens[to_device(counted, torch.long, tokens.device)]
        rows = to_device([self.rows[slots[i]] for i in counted], torch.long, tokens.device)
        ones = torch.ones(len(counted), dtype=torch.int32, device=tokens.device)
        self.said.view(-1).index_add_(0, rows * self.said.shape[1] + chosen, ones)

    def apply(self, logits: Tensor, first: int, jobs: Mapping[int, Job], drafts: Mapping[int, Sequence[int]]) -> Tensor:
        """Logits ``[rows, T, vocab]`` of the slots ``first ...`` as their parameters change them.

        drafts: what the step reads behind each slot's newest token. The given logits are left as they are; where no
        parameter changes anything, they are returned.
        """
        counting = [slot for slot, job in jobs.items() if job.request.params.counts_tokens]
        barred = barred_ends(logits, first, jobs)
        if not counting and not barred:
            return logits
        changed = logits.clone()
        for start in range(0, len(counting), ROWS_AT_ONCE):
            slots = counting[start : start + ROWS_AT_ONCE]
            places = to_device([slot - first for slot in slots], torch.long, logits.device)
            said, read = self.tables(slots, [drafts.get(slot, ()) for slot in slots], logits.shape[1])
            params = [jobs[slot].request.params for slot in slots]
            changed.index_copy_(0, places, penalised(logits.index_select(0, places), said, read, params))
        if barred:
            where = to_device([number for place in barred for number in place], torch.long, logits.device)
            changed.index_put_(tuple(where.view(-1, 3).T), changed.new_full((), -math.inf))
        return changed

    def tables(self, slots: Sequence[int], drafts: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
        """Said, int32 ``[n, length, vocab]`` with the drafts before each place, and read, bool ``[n, 1, vocab]``."""
        device, vocab = self.said.device, self.said.shape[1]
        rows = to_device([self.rows[slot] for slot in slots], torch.long, device)
        said, read = self.said.index_select(0, rows)[:, None], self.read.index_select(0, rows)[:, None]
        drafted = [
            (row * length + place) * vocab + token
            for row, tokens in enumerate(drafts)
            for before, token in enumerate(tokens)
            for place in range(before + 1, length)
        ]
        if drafted:
            said = said.repeat(1, length, 1)
            ones = torch.ones(len(drafted), dtype=torch.int32, device=device)
            said.view(-1).index_add_(0, to_device(drafted, torch.long, device), ones)
        return said, read


def penalised(logits: Tensor, said: Tensor, read: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The formulas above for logits ``[n, T, vocab]``; said and read: of the same shape, or with one place for all."""

    def column(values: Sequence[float | None], neutral: float) -> Tensor:
        numbers = [neutral if value is None else value for value in values]
        return to_device(numbers, logits.dtype, logits.device)[:, None, None]

    repetition = column([p.repetition_penalty for p in params], 1.0)
    known = read | (said > 0)
    x = torch.where(known, torch.where(logits < 0, logits * repetition, logits / repetition), logits)
    x -= said * column([p.frequency_penalty for p in params], 0.0)
    x -= (said > 0) * column([p.presence_penalty for p in params], 0.0)
    return x


def barred_ends(logits: Tensor, first: int, jobs: Mapping[int, Job]) -> list[tuple[int, int, int]]:
    """Row, place and token of every end token that comes too early."""
    _, length, vocab = logits.shape
    return [
        (slot - first, place, token)
        for slot, job in jobs.items()
        if job.request.params.min_tokens
        for place in range(min(length, job.request.params.min_tokens - job.said))
        for token in job.request.end_ids
        if token < vocab
    ]
