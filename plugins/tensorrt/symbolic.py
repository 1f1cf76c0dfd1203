"""Integers that remember how they were computed from sizes that are only known when the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Symbolic(int):
    """The value that a size has while the engine is built, with an expression for the value that it has later.

    Launch records decide by the value (which kernel, how many slices) and compute grids and arguments from it; what they
    compute stays an expression. Only what launch records use is kept symbolic: sums, products, floor and ceiling division.
    """

    make: Callable[[Any], Any]

    def __new__(cls, value: int, make: Callable[[Any], Any]) -> Symbolic:
        """make: the expression, given the module ``tensorrt.plugin`` that computes with expressions."""
        self = super().__new__(cls, value)
        self.make = make
        return self

    def __add__(self, other: int) -> Symbolic:
        return Symbolic(int(self) + int(other), lambda trtp: self.make(trtp) + expression(other, trtp))

    def __mul__(self, other: int) -> Symbolic:
        return Symbolic(int(self) * int(other), lambda trtp: self.make(trtp) * expression(other, trtp))

    def __floordiv__(self, other: int) -> Symbolic:
        return Symbolic(int(self) // int(other), lambda trtp: self.make(trtp) // expression(other, trtp))

    __radd__, __rmul__ = __add__, __mul__

    def refuse(self, *_: Any) -> Any:
        raise TypeError(
            "a launch record computes something with a dynamic size that TensorRT is not told; see Symbolic"
        )

    # An int would answer, with a plain number that is right for the size at hand and wrong for every other.
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = refuse
    __divmod__ = __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = __abs__ = refuse

    def __neg__(self) -> NegatedSymbolic:
        return NegatedSymbolic(self)


class NegatedSymbolic(int):
    """``-x``, which exists for ``-(-x // n)``, the ceiling of ``x / n``: TensorRT has a ceiling division, but no sign."""

    positive: Symbolic

    def __new__(cls, positive: Symbolic) -> NegatedSymbolic:
        self = super().__new__(cls, -int(positive))
        self.positive = positive
        return self

    def __floordiv__(self, other: int) -> NegatedSymbolic:
        positive, divisor = self.positive, int(other)
        ceiling = Symbolic(-(-int(positive) // divisor), lambda trtp: trtp.cdiv(positive.make(trtp), divisor))
        return NegatedSymbolic(ceiling)

    def __neg__(self) -> Symbolic:
        return self.positive


def expression(value: int, trtp: Any) -> Any:
    """A number or a Symbolic as something ``tensorrt.plugin`` computes with."""
    return value.make(trtp) if isinstance(value, Symbolic) else int(value)
