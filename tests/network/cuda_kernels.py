"""The embedded engine's kernels in torch, so that the backend that launches them can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.device import attention, elementwise, experts, linear, norms


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    out_dtype: torch.dtype,
    second: Tensor | None = None,
    mode: str = "plain",
    groups: int = 1,
    zero_centred: bool = False,
    sigmoid: bool = False,
) -> tuple[Tensor, Tensor]:
    total = x + second if mode == "sum" else x
    act = torch.sigmoid if sigmoid else F.silu
    wide = total.float() * (act(second.float()) if mode == "gate_before" else 1)
    parts = wide.unflatten(1, (groups, -1))
    normed = (parts * (parts.square().mean(-1, keepdim=True) + epsilon).rsqrt()).flatten(1)
    normed = normed * (weight.float() + zero_centred).repeat(x.shape[1] // len(weight))
    return (normed * (act(second.float()) if mode == "gate_after" else 1)).to(out_dtype), total


def gated(x: Tensor, gate: Tensor, sigmoid: bool) -> Tensor:
    return (x.float() * (torch.sigmoid if sigmoid else F.silu)(gate.float())).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def cache_update(cache: Tensor, x: Tensor, step: Tensor, block: int = 1) -> None:
    for row, plan in enumerate(step.tolist()):
        slot, committed, length = plan[Step.SLOT], plan[Step.COMMITTED], plan[Step.QUERY_LEN]
        for i in range(length if slot >= 0 else 0):
            if (committed + i + 1) % block == 0:
                cache[slot, :, (committed + i) // block] = x[row, i].to(cache.dtype)


def rope(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    dim = 2 * cosines.shape[-1]
    a, b = x[..., :dim].float().unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(-1 if interleaved else -2)
    cos, sin = cosines[:, :, None], sines[:, :, None]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., dim:]), -1)


@contextmanager
def kernels_in_torch() -> Iterator[None]:
    """CudaNetwork runs on a CPU with float32 engines; attention and experts by torch's operations."""
    with (
        patch.object(norms, "rms_norm", rms_norm),
        patch.object(elementwise, "gated", gated),
        patch.object(elementwise, "relu2", relu2),
        patch.object(attention, "cache_update", cache_update),
        patch.object(attention, "rope", rope),
        patch.object(attention.AttentionShape, "suited", False),
        patch.object(linear, "row_linear", F.linear),
        patch.object(experts, "suited", lambda *_: False),
        patch.object(experts, "MOST_EXPERTS", 0),
    ):
        yield
