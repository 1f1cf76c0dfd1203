"""What 8- and 4-bit formats keep of a recurrent state: float32 in, the float32 values that the format can hold out.

States are ``[..., V, K]``; K is the axis that reads and updates sum over, so scales lie along it. Rounding is to the nearest,
ties to even. Nothing is packed: these functions say what is lost, not how it is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_replayssm.plugins.read_copy import E4M3_MAX
from trtllm_replayssm.plugins.reference.read_copy import dequantise, quantise

INT8_MAX = 127.0


def e4m3(x: Tensor) -> Tensor:
    """Rounded to E4M3; what lies beyond its range becomes its largest value."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale``, and 0 where the scale is 0."""
    return x / torch.where(scale > 0, scale, 1.0)


def fp8(state: Tensor) -> Tensor:
    """E4M3 with a float32 scale for each row of K, the row's largest magnitude over 448."""
    scale = state.abs().amax(-1, keepdim=True) / E4M3_MAX
    return e4m3(divided(state, scale)) * scale


def int8(state: Tensor) -> Tensor:
    """Integers of -127 to 127 with a float32 scale for each row of K."""
    scale = state.abs().amax(-1, keepdim=True) / INT8_MAX
    return divided(state, scale).round().clamp(-INT8_MAX, INT8_MAX) * scale


def nvfp4(state: Tensor) -> Tensor:
    """As a read copy holds it (plugins/read_copy.py); K must be a multiple of 16."""
    return dequantise(quantise(state, "nvfp4"))


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"fp8": fp8, "int8": int8, "nvfp4": nvfp4}
