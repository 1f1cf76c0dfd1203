"""The 4-bit float E2M1 (1 sign, 2 exponent, 1 mantissa bit), two to a byte, and the power-of-two scale E8M0."""

from __future__ import annotations

import torch
from torch import Tensor

#: Magnitudes by the lower three bits of a code; the fourth is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
#: Both values of every byte: the low nibble is the even column.
PAIRS = torch.tensor([(CODES[byte & 15], CODES[byte >> 4]) for byte in range(256)])
#: ``2^(byte - 127)``; 255 is NaN.
POWERS = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")])


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 ``[n, 2 m]`` of uint8 ``[n, m]``."""
    return PAIRS.index_select(0, packed.flatten().int()).view(len(packed), -1)


def decode_e8m0(scales: Tensor) -> Tensor:
    """float32 of the same shape as the uint8 codes."""
    return POWERS.index_select(0, scales.flatten().int()).view(scales.shape)
