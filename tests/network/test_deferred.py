"""A Deferred is the tensor that it stands for, computed once, unless the op behind it did."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.network.deferred import Activated, Cast, Deferred, Gated, HeadNorm, Sum, resolved

A, B = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


class Counted(Deferred):
    def __init__(self, x: Tensor) -> None:
        super().__init__(x.shape, x.dtype, x.device)
        self.x, self.times = x, 0

    def compute(self) -> Tensor:
        self.times += 1
        return self.x


def test_functions_methods_and_operators_see_the_tensor() -> None:
    x = Counted(A)
    assert (tuple(x.shape), x.dtype, len(x), x.pending) == ((2, 3, 4), torch.float32, 2, True)
    weight = torch.randn(5, 4)
    assert torch.equal(F.linear(x, weight), F.linear(A, weight))
    assert torch.equal(torch.cat((x, B)), torch.cat((A, B)))
    assert torch.equal(x.flatten(1), A.flatten(1))
    assert torch.equal(x[0, :, 1:], A[0, :, 1:])
    for own, plain in ((x + B, A + B), (x - B, A - B), (x * B, A * B), (x / B, A / B), (B + x, B + A), (B * x, B * A)):
        assert torch.equal(own, plain)
    assert torch.equal(x @ weight.T, A @ weight.T)
    assert x.times == 1 and not x.pending


def test_what_the_op_behind_has_computed_is_not_computed_again() -> None:
    x = Counted(A)
    x.done = B
    assert resolved(x) is B and x.times == 0
    assert resolved(B) is B


def test_each_kind_is_its_formula() -> None:
    assert torch.equal(Sum(A, B).value, A + B)
    assert torch.equal(Sum(Sum(A, B), A).value, A + B + A)
    narrow = A.bfloat16()
    assert Cast(narrow).dtype == torch.float32 and torch.equal(Cast(narrow).value, narrow.float())
    gate = Activated(B, "silu", F.silu)
    assert torch.equal(gate.value, F.silu(B))
    assert torch.equal(Gated(A, gate, lambda x, y, kind: x * getattr(F, kind)(y)).value, A * F.silu(B))
    heads = A.unflatten(2, (2, 2))

    def norm(x: Tensor, gate: Tensor | None = None, kind: str = "") -> Tensor:
        return 2 * x.flatten(2) if gate is None else 2 * x.flatten(2) * getattr(F, kind)(gate)

    assert torch.equal(HeadNorm(heads, False, norm).value, 2 * heads)
    flat = HeadNorm(heads, False, norm).flattened()
    assert flat.shape == A.shape and torch.equal(flat.value, 2 * A)
    assert torch.equal(flat.gated(Activated(B, "silu", F.silu)), 2 * A * F.silu(B))
