"""What 8- and 4-bit formats keep of a recurrent state: float32 in, the float32 values that the format can hold out.

States are ``[..., V, K]``; K is the axis that reads and updates sum over, so scales lie along it. Rounding is to the nearest,
ties to even. Nothing is packed: these functions say what is lost, not how it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_replayssm.plugins.read_copy import E2M1_MAX, E4M3_MAX
from trtllm_replayssm.plugins.read_copy import FORMATS as COPIES
from trtllm_replayssm.plugins.reference.read_copy import quotient

INT8_MAX = 127.0


def e4m3(x: Tensor) -> Tensor:
    """Rounded to E4M3; what lies beyond its range becomes its largest value."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale``, and 0 where the scale is 0."""
    return x / torch.where(scale > 0, scale, 1.0)


def fp8(state: Tensor) -> Tensor:
    """E4M3 with a float32 scale for each row of K, the row's largest magnitude over 448."""
    scale = quotient(state.abs().amax(-1, keepdim=True), E4M3_MAX)
    return e4m3(divided(state, scale)) * scale


def int8(state: Tensor) -> Tensor:
    """Integers of -127 to 127 with a float32 scale for each row of K."""
    scale = quotient(state.abs().amax(-1, keepdim=True), INT8_MAX)
    return divided(state, scale).round().clamp(-INT8_MAX, INT8_MAX) * scale


def e2m1(x: Tensor) -> Tensor:
    """Rounded to E2M1, whose values are 0.5 apart below 2, 1 apart below 4, and 2 apart up to 6."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    apart = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / apart).round() * apart).copysign(x)


def nvfp4(state: Tensor) -> Tensor:
    """The values of a read copy (plugins/read_copy.py), in few operations; K must be a multiple of 16."""
    blocks = state.unflatten(-1, (-1, COPIES["nvfp4"].block))
    amax = blocks.abs().amax(-1, keepdim=True)
    head_scale = quotient(amax.amax((-3, -2, -1), keepdim=True), E2M1_MAX * E4M3_MAX)
    block_scale = e4m3(divided(quotient(amax, E2M1_MAX), head_scale))
    scale = block_scale * head_scale
    codes = torch.where(scale > 0, e2m1(blocks * (1 / scale)), 0.0)
    return (codes * block_scale * head_scale).flatten(-2)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "int8": int8, "nvfp4": nvfp4}
