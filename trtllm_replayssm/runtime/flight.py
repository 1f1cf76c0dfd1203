"""A step between its launch and the moment that its tokens are dealt with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.logprobs import KeptLogits
from trtllm_replayssm.runtime.outputs import Logprob
from trtllm_replayssm.runtime.readback import Arriving
from trtllm_replayssm.runtime.speculation.drafter import Draft


@dataclass(frozen=True)
class Verification:
    """What it takes to judge a step's drafts.

    logits: float32 ``[rows, T, vocab]``, the model's own; judged: the same as the parameters of the requests change them.
    """

    drafts: Mapping[int, Draft]
    logits: Tensor
    judged: Tensor


@dataclass
class Flight:
    """A step that was handed to the device.

    first: slot of row 0. decodes: whether it is behind the prompts. jobs: by slot, those that took part; takers: those of
    them that get tokens. starts: by slot, the position of the first token that it read; behind: the tokens behind those, as
    far as they were known. tokens: int64 ``[rows, T]``, what the model takes after each token that was read; None where
    nobody gets any. kept: what requests keep of the logits. verification: of a step with drafts, which commits nothing before
    they are judged; without, one token of each taker was committed at once.
    """

    first: int
    decodes: bool
    jobs: Mapping[int, Job]
    takers: Mapping[int, Job]
    starts: Mapping[int, int]
    behind: Mapping[int, Sequence[int]]
    tokens: Arriving | None = None
    kept: KeptLogits | None = None
    verification: Verification | None = None

    def drafted(self, slot: int) -> int:
        """Drafts that the step verifies in that slot."""
        return 0 if self.verification is None else len(self.verification.drafts[slot].tokens)


@dataclass(frozen=True)
class News:
    """Tokens that a request has from a step, ``count`` of them, and that nobody was told of. slot: where it was then."""

    job: Job
    slot: int
    count: int
    kept: KeptLogits | None

    def kept_of(self, place: int) -> tuple[Tensor | None, dict[int, Logprob] | None]:
        """Logits and log-probabilities of the next token to tell, at that place of the step, where its request keeps them."""
        if self.kept is None:
            return None, None
        token = self.job.request.tokens[self.job.request.told]
        return self.kept.logits(self.slot, place), self.kept.logprobs(self.slot, place, token)
