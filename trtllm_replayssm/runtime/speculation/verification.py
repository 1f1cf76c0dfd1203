"""Which drafts stay: the rule that keeps every text as likely as it would be without drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trtllm_replayssm.runtime.sampling import NO_TOKEN, SamplingParams, distribution, pick, uniform
from trtllm_replayssm.runtime.speculation.drafter import Draft


def verify(logits: Tensor, own: Sequence[int], draft: Draft, params: SamplingParams, position: int) -> list[int]:
    """The tokens that a step yields: the accepted drafts, and one more from the model itself.

    logits: ``[drafts + 1, vocab]`` of the step, padding ids at -inf. own: the tokens that the model itself takes there
    (sampling.choose_all; a step reads them all at once); NO_TOKEN ends what stays. position: tokens before the first draft.

    A draft of known probability q is accepted with probability ``min(1, p / q)``, else replaced by a draw from
    ``max(p - q, 0)``, scaled to 1. For a draft without chance q is one-hot, and both together are one draw from p that is
    compared with the draft: the text then is the very text that the seed gives without drafts. Greedy is the case of a
    one-hot p.
    """
    tokens: list[int] = []
    for i, proposed in enumerate((*draft.tokens, None)):
        if own[i] == NO_TOKEN or params.greedy or proposed is None or draft.probabilities is None:
            tokens.append(own[i])
        else:
            tokens.append(judged(logits[i], proposed, draft.probabilities[i], params, position + i))
        if tokens[-1] != proposed:
            break
    return tokens


def judged(logits: Tensor, proposed: int, q: Tensor, params: SamplingParams, position: int) -> int:
    """The proposed token, or another one in its place. q: float64 ``[vocab]``, what it was drawn from."""
    p = distribution(logits, params)
    q = q.to(p.device)
    if uniform(params.seed, position, "accept") * float(q[proposed]) < float(p[proposed]):
        return proposed
    # Where rounding leaves nothing of the difference, p and q are equal and either will do.
    rest = (p - q).clamp(min=0)
    return pick(rest if bool(rest.any()) else p, uniform(params.seed, position, "residual"))
