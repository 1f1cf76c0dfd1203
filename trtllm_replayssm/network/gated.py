"""Activations of MLPs whose first matrix has gate rows and up rows: one formula for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_replayssm.network.base import Network, Tensor


def swiglu(net: Network, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """``silu(gate) * up``; with a limit L, as in Ling 3.0, ``min(silu(gate), L) * clamp(up, -L, L)``."""
    gate = net.activation(gate, "silu")
    if limit is not None:
        gate, up = net.clamp(gate, -math.inf, limit), net.clamp(up, -limit, limit)
    return net.multiply(gate, up)


def clamped_swiglu(net: Network, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """``silu(min(gate, L)) * clamp(up, -L, L)``, as in GLM-5.3."""
    if limit is not None:
        gate, up = net.clamp(gate, -math.inf, limit), net.clamp(up, -limit, limit)
    return net.multiply(net.activation(gate, "silu"), up)


#: By the name of the activation.
GATED: dict[str, Callable[[Network, Tensor, Tensor, float | None], Tensor]] = {
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
}
