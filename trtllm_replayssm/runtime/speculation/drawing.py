"""Drafts in the making: one more token per request in every round, drawn from a draft model's logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.runtime.agreement import agreed
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.sampling import choose, distribution
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft


class Drawing:
    """Greedy requests get the likeliest token; the others a draw by their own parameters, and its distribution is kept."""

    def __init__(self, contexts: Mapping[int, Context], engine: Engine) -> None:
        self.contexts, self.engine = contexts, engine
        self.tokens: dict[int, list[int]] = {slot: [] for slot in contexts}
        self.probabilities: dict[int, list[Tensor]] = {slot: [] for slot in contexts}

    @property
    def open(self) -> list[int]:
        """Slots that may have another draft."""
        return [slot for slot, context in self.contexts.items() if len(self.tokens[slot]) < context.limit]

    def add(self, logits: Mapping[int, Tensor]) -> None:
        """One more draft for every open slot, from the logits ``[vocab]`` behind what it has."""
        slots = self.open
        likeliest = torch.stack([logits[slot] for slot in slots]).argmax(-1).tolist()
        chosen = []
        for slot, token in zip(slots, likeliest):
            params = self.contexts[slot].params
            if not params.greedy:
                position = len(self.contexts[slot].tokens) + len(self.tokens[slot])
                token = choose(logits[slot], params, position, purpose="draft")
                self.probabilities[slot].append(distribution(logits[slot], params))
            chosen.append([token])
        for slot, tokens in zip(slots, agreed(chosen, 1, self.engine)):
            self.tokens[slot] += tokens

    def drafts(self) -> dict[int, Draft]:
        return {
            slot: Draft(tuple(tokens), torch.stack(self.probabilities[slot]) if self.probabilities[slot] else None)
            for slot, tokens in self.tokens.items()
        }
