"""Row numbers of hashed n-gram embeddings: constants from a seed, and the reference in torch.

For the token at position p and its predecessors (t_0 = the token, t_1, t_2, ...), the n-gram of order n is mixed into
``t_0 m_0 xor t_1 m_1 xor ... t_(n-1) m_(n-1)``, whose remainders by distinct primes are the rows of as many tables, one
behind the other. A predecessor before the start of the text or behind an end-of-text token counts as that token. The
products stay below 2^63, so nothing wraps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count, islice

import torch
from torch import Tensor

#: SplitMix64 (Steele, Lea and Flood 2014).
GAMMA, MIX_1, MIX_2, MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1
#: Distance between the seeds of consecutive embeddings.
SEED_STEP = 10007


@dataclass(frozen=True)
class NgramHash:
    """size: largest n. heads: tables of every order from 2 to size. table_rows: least rows of a table.

    vocab_size: of the tokens. seed: of the multipliers. index: of the embedding among those of the model. end_token: the
    token that n-grams do not reach across.
    """

    size: int
    heads: int
    table_rows: int
    vocab_size: int
    seed: int
    index: int
    end_token: int

    @cached_property
    def multipliers(self) -> tuple[int, ...]:
        """Odd multipliers m_0 ... m_(size-1)."""
        half = max(1, (2**63 - 1) // self.vocab_size // 2)
        seed = self.seed + SEED_STEP * self.index
        return tuple(2 * (splitmix64(seed + GAMMA * (i + 1)) % half) + 1 for i in range(self.size))

    @cached_property
    def primes(self) -> tuple[int, ...]:
        """Rows of each table: consecutive primes, which no two embeddings share."""
        heads = (self.size - 1) * self.heads
        return tuple(islice(primes_from(self.table_rows), self.index * heads, (self.index + 1) * heads))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each table."""
        return tuple(sum(self.primes[:i]) for i in range(len(self.primes)))

    @property
    def rows(self) -> int:
        """Rows of all tables together."""
        return sum(self.primes)

    def order_heads(self, order: int) -> slice:
        """The tables of that order."""
        return slice((order - 2) * self.heads, (order - 1) * self.heads)


def splitmix64(value: int) -> int:
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def primes_from(start: int) -> Iterator[int]:
    """The primes of at least ``start`` in order."""
    return (n for n in count(max(start, 2)) if all(n % d for d in range(2, math.isqrt(n) + 1)))


@lru_cache
def tables(spec: NgramHash, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and first row of each table, int64 ``[tables]``."""
    primes, offsets = (torch.tensor(values, device=device) for values in (spec.primes, spec.offsets))
    return primes, offsets


def ngram_rows(spec: NgramHash, tokens: list[Tensor]) -> Tensor:
    """int64 ``[..., (size - 1) * heads]``, from int64 tokens ``[...]`` and their 1st, 2nd, ... predecessors."""
    found, mixed = [], tokens[0] * spec.multipliers[0]
    primes, offsets = tables(spec, mixed.device)
    for order in range(2, spec.size + 1):
        mixed = mixed ^ (tokens[order - 1] * spec.multipliers[order - 1])
        heads = spec.order_heads(order)
        found.append(mixed[..., None] % primes[heads] + offsets[heads])
    return torch.cat(found, -1)
