"""Reference of stochastic rounding; the contract is in plugins/rounding.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.rounding import ELEMENTS, INCREMENTS, MULTIPLIERS, ROUNDS

WORD = 0xFFFFFFFF
#: Smallest normal number and the distance of subnormal numbers of float16.
TINY, SUBNORMAL = 2.0**-14, 2.0**-24


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 of four counter words (int64 tensors of 32-bit values); four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = (word & WORD for word in key)
    for _ in range(ROUNDS):
        # Products of 32 bits by halves: they would overflow int64.
        (high0, low0), (high1, low1) = multiply(c0, MULTIPLIERS[0]), multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a product of 32-bit numbers."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = high + (low >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def random_bits(count: int, seed: int, position: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements of a state, int64."""
    index = torch.arange(-(-count // ELEMENTS), device=device)
    zero = torch.zeros_like(index)
    words = torch.stack(philox((index, zero + (position & WORD), zero, zero), (seed, 0)), 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).flatten()[:count]


def stochastic(state: Tensor, dtype: torch.dtype, seed: int, position: int) -> Tensor:
    """A slot's state rounded to bfloat16 or float16."""
    bits = random_bits(state.numel(), seed, position, state.device).view(state.shape)
    x = state.float()
    word = x.view(torch.int32).long() & WORD
    if dtype == torch.bfloat16:
        moved = (word + bits) & ~0xFFFF
    else:
        moved = (word + (bits >> 3)) & ~0x1FFF
    # Back to a signed word.
    rounded = (moved - ((moved >> 31) << 32)).int().view(torch.float32)
    if dtype == torch.float16:
        steps = (x.abs() / SUBNORMAL + bits.float() / 2**16).floor()
        rounded = torch.where(x.abs() < TINY, (steps * SUBNORMAL).copysign(x), rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)
