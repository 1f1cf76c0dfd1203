"""Sparse attention over blocks of positions, as layers: the meaning is in network/selection.py."""

from __future__ import annotations

import math

import torch

from trtllm_replayssm.network.tensorrt.attention import StepPositions, scatter_rows
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor


def update_block_cache(e: Emitter, where: StepPositions, cache: Tensor, x: Tensor, block: int) -> Tensor:
    """``Network.block_cache_update``.

    One row is written for every block that T tokens can end, ``ceil(T / block)`` of them. Where the step ends fewer, the
    rest belong to blocks that are not whole yet; padding rows write behind all blocks of a request.
    """
    size = e.number(block, torch.int64, 1)
    count = e.binary("FLOOR_DIV", e.binary("SUM", where.tokens, e.number(block - 1, torch.int64, 1)), size)
    length = e.number(block, torch.int32, 2)
    first = e.binary("FLOOR_DIV", where.committed, length)
    numbers = e.binary("SUM", first, e.reshape(e.dynamic_arange(count), (1, -1)))
    # The last token of block n is (n + 1) * block - 1 - committed of the step.
    ends = e.binary("PROD", e.binary("SUM", numbers, e.number(1, torch.int32, 2)), length)
    token = e.binary("SUB", e.binary("SUB", ends, e.number(1, torch.int32, 2)), where.committed)
    last = e.cast(e.binary("SUB", where.tokens, e.number(1, torch.int64, 1)), torch.int32)
    token = e.binary("MIN", token, e.reshape(last, (1, 1)))
    kept = e.gather(x, token, 1, shared_axes=1)
    start = where.row_of(first, cache.shape[2], count)
    # Not by the native layer: over updates of another length than T, TensorRT-RTX 1.7 crashes or does not come to an end.
    return scatter_rows(e, cache, e.transpose(e.cast(kept, e.dtype(cache)), (0, 2, 1, 3)), start, count)


def select_blocks(
    e: Emitter, where: StepPositions, q: Tensor, keys: Tensor, weights: Tensor | None, block: int, count: int
) -> Tensor | None:
    """``Network.select_blocks``: bool ``[rows, 1, T, cache_rows]``, or None where no request has more blocks."""
    blocks, heads, width = where.cache_rows // block, q.shape[2], q.shape[3]
    if blocks <= count:
        return None
    query = e.reshape(e.cast(q, torch.float32), (0, 1, -1, width))
    scores = e.matmul(query, e.cast(e.slice(keys, 2, 0, blocks), torch.float32), transpose_b=True)
    scores = e.reshape(e.activation("RELU", scores), (0, -1, heads, blocks))
    # A product of matrices also where all heads weigh alike.
    shares = e.constant(torch.ones(1, 1, 1, heads)) if weights is None else e.reshape(weights, (0, 0, 1, heads))
    scores = e.reshape(e.matmul(shares, scores), (0, 0, blocks))
    seen = e.binary("SUM", e.reshape(where.positions, (0, 0, 1)), e.number(1, torch.int32, 3))
    ends = e.constant((torch.arange(1, blocks + 1, dtype=torch.int32) * block).reshape(1, 1, -1))
    chosen = largest(e, scores, e.unary("NOT", e.binary("GREATER", ends, seen)), count)
    owner = (torch.arange(where.cache_rows, dtype=torch.int32) // block).clamp(max=blocks - 1)
    inside = e.gather(e.cast(chosen, torch.int32), e.constant(owner), 2)
    inside = e.binary("GREATER", inside, e.number(0, torch.int32, 3))
    size = e.number(block, torch.int32, 3)
    whole = e.binary("PROD", e.binary("FLOOR_DIV", seen, size), size)
    behind = e.unary("NOT", e.binary("GREATER", whole, e.arange(where.cache_rows, 3)))
    return e.reshape(e.binary("OR", inside, behind), (0, 1, -1, where.cache_rows))


def largest(e: Emitter, scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The ``count`` largest of the eligible scores ``[rows, T, n]``, of equal ones the first."""
    scores = e.select(eligible, scores, e.scalar(-math.inf, scores))
    least = e.slice(e.top_k(scores, count)[0], 2, count - 1, 1)
    above = e.binary("GREATER", scores, least)
    level = e.binary("AND", eligible, e.binary("EQUAL", scores, least))
    taken = e.reduce("SUM", e.cast(above, torch.int32), 2)
    room = e.binary("SUB", e.number(count, torch.int32, 3), taken)
    place = e.running_sum(e.cast(level, torch.int32), 2)
    fits = e.unary("NOT", e.binary("GREATER", place, room))
    return e.binary("OR", above, e.binary("AND", level, fits))
