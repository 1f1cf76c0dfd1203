"""Sparse attention over blocks of positions, in torch: which blocks a token attends to, and the cache of their keys."""

from __future__ import annotations

import torch
from torch import Tensor

#: Most numbers of a piece of the scores of all heads; a long prefill is scored piece by piece.
PIECE = 1 << 26


def update_block_cache(cache: Tensor, x: Tensor, positions: Tensor, valid: Tensor, block: int) -> Tensor:
    """``Network.block_cache_update``. positions: of x's tokens, ``[rows, T]``; valid: bool, those that are none of padding."""
    rows, tokens = (valid & ((positions + 1) % block == 0)).nonzero(as_tuple=True)
    cache[rows, :, positions[rows, tokens] // block] = x[rows, tokens].to(cache.dtype)
    return cache


def select_blocks(q: Tensor, keys: Tensor, weights: Tensor | None, positions: Tensor, block: int, count: int) -> Tensor:
    """The blocks that each token chooses, bool ``[rows, T, blocks]``; see ``Network.select_blocks``.

    q ``[rows, T, H, D]``, keys ``[rows, blocks, D]``, weights ``[rows, T, H]``, positions ``[rows, T]``. Keys of blocks that
    do not end at or before a token may hold anything.
    """
    rows, tokens, heads, _ = q.shape
    size = max(1, PIECE // (rows * heads * keys.shape[1]))
    pieces = []
    for start in range(0, tokens, size):
        here = slice(start, start + size)
        scores = torch.einsum("bthd,bpd->bthp", q[:, here].float(), keys.float()).relu_()
        total = scores.sum(2) if weights is None else torch.einsum("bthp,bth->btp", scores, weights[:, here].float())
        pieces.append(largest(total, ends_before(positions[:, here], keys.shape[1], block), count))
    return torch.cat(pieces, 1)


def ends_before(positions: Tensor, blocks: int, block: int) -> Tensor:
    """Whether a block ends at or before a token: bool ``[rows, T, blocks]``."""
    return (torch.arange(1, blocks + 1, device=positions.device) * block) <= positions[..., None] + 1


def largest(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The ``count`` largest of the eligible scores ``[..., n]``, of equal ones the first: bool ``[..., n]``.

    All of them where no more are eligible. A plain top-k leaves open which of equal scores it takes, and heads whose
    products are all negative make equal scores, zeros.
    """
    scores = scores.masked_fill(~eligible, float("-inf"))
    least = scores.topk(count, -1).values[..., -1:]
    above, level = scores > least, eligible & (scores == least)
    return above | (level & (level.cumsum(-1) <= count - above.sum(-1, keepdim=True)))


def blocks_of_tokens(chosen: Tensor, positions: Tensor, block: int, length: int) -> Tensor:
    """Positions that a token sees, bool ``[rows, T, length]``: of the chosen blocks, and behind the last whole block."""
    keys = torch.arange(length, device=chosen.device)
    inside = chosen[..., (keys // block).clamp(max=chosen.shape[-1] - 1)]
    return inside | (keys >= (positions[..., None] + 1) // block * block)
