"""Row numbers of hashed n-gram embeddings from ordinary layers; the meaning is in network/ngram.py.

TensorRT has no exclusive or of integers. The products are taken apart into their 63 bits, which are added modulo 2, and the
remainder by a prime p is that of ``sum_i bit_i (2^i mod p)``, which is small.
"""

from __future__ import annotations

import torch

from trtllm_replayssm.network.ngram import NgramHash
from trtllm_replayssm.network.tensorrt.attention import StepPositions
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor

BITS = 63


def ngram_ids(e: Emitter, where: StepPositions, spec: NgramHash, token_ids: Tensor, history: Tensor) -> Tensor:
    """``Network.ngram_ids``. history: tokens of each row by position, those of the step included, int32 ``[rows, max_seq]``."""
    mixed, found = None, []
    for order, token in enumerate(predecessors(e, where, spec, token_ids, history), 1):
        product = e.binary("PROD", e.cast(token, torch.int64), e.number(spec.multipliers[order - 1], torch.int64, 2))
        bits = bits_of(e, e.reshape(product, (0, 0, 1)))
        mixed = bits if mixed is None else modulo(e, e.binary("SUM", mixed, bits), e.number(2, torch.int64, 3))
        if order > 1:
            found.append(remainders(e, mixed, spec, order))
    return e.cast(e.concat(found, 2), torch.int32)


def predecessors(e: Emitter, where: StepPositions, spec: NgramHash, token_ids: Tensor, history: Tensor) -> list[Tensor]:
    """The tokens and their 1st, 2nd, ... predecessors, int32 ``[rows, T]``."""
    end, zero = e.number(spec.end_token, torch.int32, 2), e.number(0, torch.int32, 2)
    tokens, text = [token_ids], None
    for back in range(1, spec.size):
        position = e.binary("SUB", where.positions, e.number(back, torch.int32, 2))
        before = e.gather(history, e.binary("MAX", position, zero), 1, shared_axes=1)
        outside = e.binary("OR", e.binary("LESS", position, zero), e.binary("EQUAL", before, end))
        inside = e.unary("NOT", outside)
        text = inside if text is None else e.binary("AND", text, inside)
        tokens.append(e.select(text, before, end))
    return tokens


def modulo(e: Emitter, x: Tensor, by: Tensor) -> Tensor:
    return e.binary("SUB", x, e.binary("PROD", e.binary("FLOOR_DIV", x, by), by))


def bits_of(e: Emitter, x: Tensor) -> Tensor:
    """int64 ``[rows, T, 1]`` as ``[rows, T, BITS]``, the lowest bit first."""
    powers = e.constant((1 << torch.arange(BITS)).reshape(1, 1, -1))
    return modulo(e, e.binary("FLOOR_DIV", x, powers), e.number(2, torch.int64, 3))


def remainders(e: Emitter, bits: Tensor, spec: NgramHash, order: int) -> Tensor:
    """Rows in the tables of that order, int64 ``[rows, T, heads]``."""
    heads = spec.order_heads(order)
    primes = spec.primes[heads]
    weights = torch.tensor([[(1 << i) % prime for i in range(BITS)] for prime in primes])
    spread = e.binary("PROD", e.reshape(bits, (0, 0, 1, BITS)), e.constant(weights.reshape(1, 1, -1, BITS)))
    total = e.reshape(e.reduce("SUM", spread, 3), (0, 0, len(primes)))
    rest = modulo(e, total, e.constant(torch.tensor(primes).reshape(1, 1, -1)))
    return e.binary("SUM", rest, e.constant(torch.tensor(spec.offsets[heads]).reshape(1, 1, -1)))
