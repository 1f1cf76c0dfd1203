"""Drafts in the making: one more token per request in every round, drawn from a draft model's logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.runtime.agreement import agreed
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.sampling import NO_TOKEN, choose, distribution, likeliest
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft


class Drawing:
    """Greedy requests get the likeliest token; the others a draw by their own parameters, and its distribution is kept."""

    def __init__(self, contexts: Mapping[int, Context], engine: Engine) -> None:
        self.contexts, self.engine = contexts, engine
        self.tokens: dict[int, list[int]] = {slot: [] for slot in contexts}
        self.probabilities: dict[int, list[Tensor]] = {slot: [] for slot in contexts}
        #: Slots of which the draft model has computed what is no number.
        self.lost: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Slots that may have another draft."""
        slots = (slot for slot, context in self.contexts.items() if len(self.tokens[slot]) < context.limit)
        return [slot for slot in slots if slot not in self.lost]

    def add(self, logits: Mapping[int, Tensor]) -> None:
        """One more draft for every open slot, from the logits ``[vocab]`` behind what it has, if they are numbers."""
        slots = self.open
        best = likeliest(torch.stack([logits[slot] for slot in slots])).tolist()
        chosen = []
        for slot, token in zip(slots, best):
            params = self.contexts[slot].params
            if not params.greedy and token != NO_TOKEN:
                position = len(self.contexts[slot].tokens) + len(self.tokens[slot])
                token = choose(logits[slot], params, position, purpose="draft")
                self.probabilities[slot].append(distribution(logits[slot], params))
            chosen.append([token])
        for slot, tokens in zip(slots, agreed(chosen, 1, self.engine)):
            if NO_TOKEN in tokens:
                self.lost.add(slot)
            else:
                self.tokens[slot] += tokens

    def drafts(self) -> dict[int, Draft]:
        return {
            slot: Draft(tuple(tokens), torch.stack(self.probabilities[slot]) if self.probabilities[slot] else None)
            for slot, tokens in self.tokens.items()
        }
