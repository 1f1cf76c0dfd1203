"""Results that wait for the op behind them, so that one kernel can do both.

A decode step has many small ops, and on a GPU each costs a launch and a pass over its tensors. The op vocabulary knows no
fused ops; a backend that has kernels for some pairs returns a Deferred from the first op of a pair and looks for it in the
second. Everywhere else a Deferred is the tensor that it stands for: torch's functions, operators and the tensor's own
methods compute it first, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Deferred(ABC):
    """A tensor that has not been computed. shape, dtype, device: of it."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.done: Tensor | None = None

    @abstractmethod
    def compute(self) -> Tensor:
        """The tensor, by the first op alone."""

    @property
    def pending(self) -> bool:
        return self.done is None

    @property
    def value(self) -> Tensor:
        """The tensor; computed when it is first asked for, unless the op behind it did."""
        if self.done is None:
            self.done = self.compute()
        return self.done

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*tree_map(resolved, args), **tree_map(resolved, kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.value[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Any) -> Tensor:
        return self.value + resolved(other)

    def __sub__(self, other: Any) -> Tensor:
        return self.value - resolved(other)

    def __mul__(self, other: Any) -> Tensor:
        return self.value * resolved(other)

    def __truediv__(self, other: Any) -> Tensor:
        return self.value / resolved(other)

    def __matmul__(self, other: Any) -> Tensor:
        return self.value @ resolved(other)


def resolved(x: Any) -> Any:
    """The tensor that x stands for; anything but a Deferred as it is."""
    return x.value if isinstance(x, Deferred) else x


class Sum(Deferred):
    """``a + b`` of equal shapes and dtypes."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a.shape, a.dtype, a.device)
        self.a, self.b = a, b

    def compute(self) -> Tensor:
        return resolved(self.a) + resolved(self.b)


class Cast(Deferred):
    """``x`` in float32."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.shape, torch.float32, x.device)
        self.x = x

    def compute(self) -> Tensor:
        return self.x.float()


class Activated(Deferred):
    """``act(x)``. kind: its name; act: the function."""

    def __init__(self, x: Any, kind: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(x.shape, x.dtype, x.device)
        self.x, self.kind, self.act = x, kind, act

    def compute(self) -> Tensor:
        return self.act(resolved(self.x))


class Gated(Deferred):
    """``x * act(gate)``. product: computes it."""

    def __init__(self, x: Any, gate: Activated, product: Callable[[Tensor, Tensor, str], Tensor]) -> None:
        super().__init__(x.shape, x.dtype, x.device)
        self.x, self.gate, self.kind, self.product = x, gate.x, gate.kind, product

    def compute(self) -> Tensor:
        return self.product(resolved(self.x), resolved(self.gate), self.kind)


class HeadNorm(Deferred):
    """The norm of each head of x ``[rows, T, H, D]``; the result is that, or ``[rows, T, H * D]`` once it was flattened."""

    def __init__(self, x: Tensor, flat: bool, norm: Callable[..., Tensor]) -> None:
        super().__init__(x.flatten(2).shape if flat else x.shape, x.dtype, x.device)
        self.x, self.norm = x, norm

    def compute(self) -> Tensor:
        return self.norm(self.x).view(self.shape)

    def flattened(self) -> HeadNorm:
        return HeadNorm(self.x, True, self.norm)

    def gated(self, gate: Activated) -> Tensor:
        """The norm times ``act(gate)``; the gate is ``[rows, T, H * D]``."""
        return self.norm(self.x, resolved(gate.x), gate.kind).view(self.shape)
