"""Activations of MLPs whose first matrix has gate rows and up rows: one formula for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_replayssm.network.base import Network, Tensor

#: Bound of both factors, bounds of gate and up apart, or None; in a pair, too, None leaves that factor unbounded.
Limit = float | tuple[float | None, float | None] | None


def swiglu(net: Network, gate: Tensor, up: Tensor, limit: Limit) -> Tensor:
    """``silu(gate) * up``; with a limit L, as in Ling 3.0, ``min(silu(gate), L) * clamp(up, -L, L)``."""
    gate_limit, up_limit = apart(limit)
    return net.multiply(below(net, net.activation(gate, "silu"), gate_limit), within(net, up, up_limit))


def clamped_swiglu(net: Network, gate: Tensor, up: Tensor, limit: Limit) -> Tensor:
    """``silu(min(gate, L)) * clamp(up, -L, L)``, as in GLM-5.3."""
    gate_limit, up_limit = apart(limit)
    return net.multiply(net.activation(below(net, gate, gate_limit), "silu"), within(net, up, up_limit))


def situ(net: Network, gate: Tensor, up: Tensor, limit: Limit) -> Tensor:
    """Sigmoid tanh unit of Kimi-K3, in float32: ``softened(gate, L) sigmoid(gate) softened(up, M)``, with its limits L and M.

    ``softened(x, L) = L tanh(x / L)``, which is near x around 0 and stays within -L and L.
    """
    gate_limit, up_limit = apart(limit)
    wide_gate, wide_up = net.cast(gate, "float32"), net.cast(up, "float32")
    bounded = net.multiply(softened(net, wide_gate, gate_limit), net.activation(wide_gate, "sigmoid"))
    return net.cast_like(net.multiply(bounded, softened(net, wide_up, up_limit)), gate)


def apart(limit: Limit) -> tuple[float | None, float | None]:
    """Bounds of gate and of up."""
    return limit if isinstance(limit, tuple) else (limit, limit)


def below(net: Network, x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else net.clamp(x, -math.inf, limit)


def within(net: Network, x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else net.clamp(x, -limit, limit)


def softened(net: Network, x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else net.scale(net.activation(net.scale(x, 1 / limit), "tanh"), limit)


#: By the name of the activation.
GATED: dict[str, Callable[[Network, Tensor, Tensor, Limit], Tensor]] = {
    "swiglu": swiglu,
    "clamped_swiglu": clamped_swiglu,
    "situ": situ,
}
