"""How many drafts a request should get: as many as are likely to pay."""

from __future__ import annotations

#: Time that one more token adds to a step, as a share of a step of one token.
TOKEN_COST = 0.1
#: Weight of the past against the newest step.
MEMORY = 0.8


class DraftLength:
    """Follows how often one request's drafts are accepted.

    With the probability ``p`` that a draft is accepted when those before it were, ``k`` drafts make
    ``1 + p + ... + p^k`` tokens in a step that takes ``1 + k * TOKEN_COST``; the length has the best ratio. It never falls
    below 1, so that a text that becomes easy again is noticed.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        #: Draft tokens that were judged, and those of them that were right; a good start is assumed.
        self.judged = self.right = 1.0

    def update(self, drafted: int, accepted: int) -> None:
        """One step's outcome. Drafts behind the first wrong one were not judged."""
        if drafted:
            self.judged = MEMORY * self.judged + accepted + (accepted < drafted)
            self.right = MEMORY * self.right + accepted

    @property
    def value(self) -> int:
        probability = self.right / self.judged

        def tokens_per_time(length: int) -> float:
            return sum(probability**i for i in range(length + 1)) / (1 + length * TOKEN_COST)

        return max(range(1, self.longest + 1), key=tokens_per_time)
