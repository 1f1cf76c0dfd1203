"""Prompt lookup: what followed the last few tokens when the request held them before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter

#: Tokens of the longest and the shortest end of the text that is looked up.
LONGEST, SHORTEST = 3, 1


class NgramDrafter(Drafter):
    """Needs no model. A longer match is preferred to a shorter one, a later one to an earlier one."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        if not 1 <= shortest <= longest:
            raise UserError(f"n-grams of {shortest} to {longest} tokens cannot be looked up", "use 1 or more tokens")
        self.lengths = range(longest, shortest - 1, -1)
        self.indices: dict[int, NgramIndex] = {}

    def admit(self, slot: int) -> None:
        self.indices[slot] = NgramIndex(self.lengths)

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        found = {slot: self.indices[slot].lookup(context.tokens, context.limit) for slot, context in contexts.items()}
        return {slot: Draft(tokens) for slot, tokens in found.items() if tokens}


class NgramIndex:
    """Where every n-gram of one growing text ended last. Each token is read once, however long the text becomes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self.indexed = 0

    def lookup(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to ``limit`` tokens that followed an earlier occurrence of the text's end. ``tokens`` begins as it did before."""
        # The n-gram that ends the text is not indexed yet, or it would only find itself.
        for end in range(self.indexed + 1, len(tokens)):
            for length, ends in self.ends.items():
                if end >= length:
                    ends[tuple(tokens[end - length : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)
        for length, ends in self.ends.items():
            match = ends.get(tuple(tokens[len(tokens) - length :])) if len(tokens) > length else None
            if match is not None:
                return self.continued(tokens, match, limit)
        return ()

    @staticmethod
    def continued(tokens: Sequence[int], start: int, limit: int) -> tuple[int, ...]:
        """``limit`` tokens from ``start`` on; past the end of the text the drafts themselves are what follows."""
        period = len(tokens) - start
        return tuple(tokens[start + i % period] for i in range(limit))
