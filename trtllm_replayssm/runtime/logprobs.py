"""What requests keep of the logits that their tokens were chosen from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.runtime.outputs import Logprob
from trtllm_replayssm.runtime.readback import Arriving
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import ROWS_AT_ONCE, likeliest_first, to_device


class KeptLogits:
    """Logits and log-probabilities of a step's tokens, on their way to the host."""

    def __init__(self, logits: Tensor, tokens: Tensor, first: int, requests: Mapping[int, Request]) -> None:
        """logits: float32 ``[rows, T, vocab]`` of the slots ``first ...``, the model's own. tokens: int64 ``[rows, T]``, those
        that were chosen. requests: by slot, all that get some of them."""
        whole = [slot for slot, request in requests.items() if request.params.return_generation_logits]
        named = {slot: r.params.logprobs for slot, r in requests.items() if r.params.logprobs is not None}
        device = logits.device

        def rows_of(tensor: Tensor, slots: list[int]) -> Tensor:
            return tensor.index_select(0, to_device([slot - first for slot in slots], torch.long, device))

        self.length, self.counts = logits.shape[1], named
        self.whole_rows = {slot: row for row, slot in enumerate(whole)}
        self.named_rows = {slot: row for row, slot in enumerate(named)}
        self.whole = Arriving(rows_of(logits, whole)) if whole else None
        self.named: list[Arriving] = []
        if named:
            flat = rows_of(logits, [*named]).flatten(0, 1), rows_of(tokens, [*named]).flatten()
            self.named = [Arriving(found) for found in logprobs(*flat, max(named.values()))]

    def logits(self, slot: int, place: int) -> Tensor | None:
        """``[vocab]`` for the slot's token at that place of the step; None where its request does not keep them."""
        if self.whole is None or slot not in self.whole_rows:
            return None
        return self.whole.get()[self.whole_rows[slot], place].clone()

    def logprobs(self, slot: int, place: int, token: int) -> dict[int, Logprob] | None:
        """The token's log-probability and those of the likeliest tokens, by token; None where its request keeps none."""
        if slot not in self.counts:
            return None
        row, count = self.named_rows[slot] * self.length + place, self.counts[slot]
        own, ranks, values, ids = (found.get()[row] for found in self.named)
        made = {token: Logprob(float(own), int(ranks))}
        for rank, (value, other) in enumerate(zip(values[:count].tolist(), ids[:count].tolist()), 1):
            made.setdefault(other, Logprob(value, rank))
        return made


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits ``[n, vocab]`` the log-probability of each row's token, float64 ``[n]``, and its rank, 1 for the likeliest;
    then those of the ``count`` likeliest tokens ``[n, count]``, and the tokens; of equals the lower id comes first."""
    pieces, count = [], min(count, logits.shape[-1])
    for start in range(0, len(logits), ROWS_AT_ONCE):
        some = logits[start : start + ROWS_AT_ONCE]
        values = some.double().log_softmax(-1)
        own = values.gather(1, tokens[start : start + ROWS_AT_ONCE, None])
        likeliest = likeliest_first(some, count)
        pieces.append((own[:, 0], 1 + (values > own).sum(-1), values.gather(1, likeliest), likeliest))
    own, ranks, values, ids = (torch.cat(parts) for parts in zip(*pieces))
    return own, ranks, values, ids
