"""Reference of the read copy; formats and formulas are in plugins/read_copy.py."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from trtllm_replayssm.plugins.read_copy import (
    E2M1_MAGNITUDES,
    E2M1_MAX,
    E4M3_MAX,
    FORMATS,
    LEAST_EXPONENT,
    read_dtype_of,
)
from trtllm_replayssm.replay import ReadDtype

E4M3 = torch.float8_e4m3fn
#: ``E2M1 = E4M3 * 64`` for the E4M3 number whose sign, lower exponent bits and upper mantissa bit are those of the code: the
#: difference of the two exponents' biases, 7 and 1. It holds for the subnormal 0.5, too.
E2M1_FACTOR = 2.0**6
#: float32's exponent bias and position, which are also those of E8M0.
BIAS, MANTISSA_BITS = 127, 23


def quantise(state: Tensor, read_dtype: ReadDtype) -> dict[str, Tensor]:
    """The pools' contents ``[slots, ...]`` for checkpoints ``[slots, H, R, C]`` of any floating dtype."""
    blocks = state.float().unflatten(-1, (-1, FORMATS[read_dtype].block))
    amax = blocks.abs().amax(-1, keepdim=True)
    return quantise_fp8(blocks, amax) if read_dtype == "fp8" else quantise_nvfp4(blocks, amax)


def dequantise(copy: dict[str, Tensor]) -> Tensor:
    """Values ``[slots, H, R, C]`` in float32 of the contents of the copy's pools."""
    read_dtype = read_dtype_of(copy)
    codes, scales = copy["read_codes"], copy["read_scales"]
    if read_dtype == "fp8":
        blocks = codes.view(E4M3).float().unflatten(-1, (-1, FORMATS[read_dtype].block))
        return (blocks * power_of_two(scales.view(torch.uint8).int())[..., None]).flatten(-2)
    blocks = unpack_e2m1(codes).unflatten(-1, (-1, FORMATS[read_dtype].block))
    return ((blocks * scales.view(E4M3).float()[..., None]).flatten(-2)) * copy["read_head_scale"][..., None, None]


def quantise_fp8(blocks: Tensor, amax: Tensor) -> dict[str, Tensor]:
    # amax = m 2^k with m in [0.5, 1), and 448 = 0.875 * 2^9.
    fraction, exponent = torch.frexp(amax)
    exponent = torch.where(amax == 0, LEAST_EXPONENT, exponent - 9 + (fraction > 0.875).int())
    exponent = torch.where(amax.isfinite(), exponent, BIAS).clamp(min=LEAST_EXPONENT)
    codes = (blocks * power_of_two(BIAS - exponent)).to(E4M3)
    scales = (BIAS + exponent).to(torch.uint8)
    return {"read_codes": codes.view(torch.int8).flatten(-2), "read_scales": scales.view(torch.int8).squeeze(-1)}


def quantise_nvfp4(blocks: Tensor, amax: Tensor) -> dict[str, Tensor]:
    head_scale = quotient(amax.amax((-3, -2, -1), keepdim=True), E2M1_MAX * E4M3_MAX)
    wanted = torch.where(head_scale == 0, 0.0, quotient(amax, E2M1_MAX) / head_scale)
    block_scale = wanted.clamp(max=E4M3_MAX).to(E4M3)
    scale = block_scale.float() * head_scale
    codes = torch.where(scale == 0, 0, e2m1_codes(blocks * (1 / scale))).flatten(-2)
    return {
        "read_codes": (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8),
        "read_scales": block_scale.view(torch.int8).squeeze(-1),
        "read_head_scale": head_scale.flatten(-4),
    }


def quotient(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded once: on a GPU torch multiplies by the inverse of a Python number."""
    return x / torch.full_like(x, divisor)


def power_of_two(biased: Tensor) -> Tensor:
    """``2^(biased - 127)`` in float32, exactly."""
    return (biased << MANTISSA_BITS).view(torch.float32)


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes of float32 values rounded to the nearest, to the even code between two, 6 at most."""
    magnitude = x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(E2M1_MAGNITUDES)):
        middle = (low + high) / 2
        # Halfway between an odd code and the next, the even one is the next.
        codes += magnitude >= middle if code % 2 else magnitude > middle
    return codes | x.signbit().to(torch.uint8) << 3


def unpack_e2m1(packed: Tensor) -> Tensor:
    """float32 ``[..., 2 n]`` of int8 or uint8 ``[..., n]``, by arithmetic on bits: a CUDA graph may hold it."""
    codes = torch.stack((packed & 15, packed >> 4 & 15), -1).flatten(-2)
    return ((codes & 7) << 2 | (codes & 8) << 4).view(E4M3).float().mul_(E2M1_FACTOR)


def write_copy(pools: dict[str, Tensor], slots: Tensor) -> None:
    """Bring the copy of ``slots`` up to date with ``pools['state']``; nothing to do in a layer without a copy."""
    read_dtype = read_dtype_of(pools)
    if read_dtype != "same":
        for name, value in quantise(pools["state"][slots], read_dtype).items():
            pools[name][slots] = value


def read_copy(pools: dict[str, Tensor], slots: Tensor) -> Tensor:
    """The copy's values ``[len(slots), H, R, C]`` in float32."""
    return dequantise({name: pool[slots] for name, pool in pools.items() if name.startswith("read_")})
