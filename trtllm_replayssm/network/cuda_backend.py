"""The torch backend on a GPU, with kernels of its own where a chain of torch ops would wait for memory, launches or the host.

No op here depends on a value that only the device knows, so that a step can be captured in a CUDA graph. Rows may stand for
any slots: state is addressed by ``step[r, SLOT]``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.deferred import Activated, Cast, Gated, HeadNorm, Sum, resolved
from trtllm_replayssm.network.experts import masked_experts
from trtllm_replayssm.network.gated import Limit, apart
from trtllm_replayssm.network.packed import StoredWeight, dense
from trtllm_replayssm.network.routing import Routing
from trtllm_replayssm.network.torch_backend import ACTIVATIONS, TorchNetwork
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.device import attention, elementwise, experts, linear, norms
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

#: dtypes of the kernels.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Activations that a gate's kernel knows.
GATES = ("silu", "sigmoid")


class CudaNetwork(TorchNetwork):
    """See TorchNetwork. Sums and gates wait for the norm behind them (network.deferred)."""

    # ---- products ----------------------------------------------------------------------------------------------------

    def _linear(self, x: Any, weight: StoredWeight, bias: Tensor | None) -> Tensor:
        widened = isinstance(x, Cast) and x.pending and x.x.dtype == torch.bfloat16
        if widened and isinstance(weight, Tensor) and weight.dtype == torch.float32 and bias is None:
            return wide_linear(x.x.flatten(0, -2), weight).view(*x.shape[:-1], -1)
        x = resolved(x)
        if isinstance(weight, Tensor) and weight.ndim == 2 and linear.suited(flat := x.flatten(0, -2), weight, bias):
            return linear.row_linear(flat, weight, bias).view(*x.shape[:-1], -1)
        return super()._linear(x, weight, bias)

    # ---- sums, gates and norms ---------------------------------------------------------------------------------------

    def _add(self, a: Any, b: Any) -> Any:
        fits = a.shape == b.shape and a.dtype == b.dtype in FLOATS and len(a.shape) == 3
        return Sum(a, b) if fits else resolved(a) + resolved(b)

    def activation(self, x: Any, kind: str) -> Any:
        if kind == "relu2" and x.dtype in FLOATS:
            return elementwise.relu2(as_tokens(resolved(x))).view(x.shape)
        return Activated(x, kind, ACTIVATIONS[kind]) if kind in GATES else super().activation(resolved(x), kind)

    def _multiply(self, a: Any, b: Any) -> Any:
        if isinstance(a, Activated) and not isinstance(b, Activated):
            a, b = b, a
        if isinstance(b, Activated) and b.pending and a.shape == b.shape and a.dtype == b.dtype in FLOATS:
            if isinstance(a, HeadNorm) and a.pending and len(a.shape) == 3:
                return a.gated(b)
            return Gated(a, b, gated_product)
        return resolved(a) * resolved(b)

    def _flatten(self, x: Any, axes: int) -> Any:
        if isinstance(x, HeadNorm) and x.pending and axes == 2:
            return x.flattened()
        return super()._flatten(resolved(x), axes)

    def _rms_norm(
        self, x: Any, weight: Tensor | None, epsilon: float, zero_centred: bool, groups: int, over_ranks: bool
    ) -> Any:
        if weight is None or over_ranks or x.dtype not in FLOATS:
            return super()._rms_norm(resolved(x), weight, epsilon, zero_centred, groups, over_ranks)
        norm = partial(norms.rms_norm, weight=weight, epsilon=epsilon, out_dtype=x.dtype, zero_centred=zero_centred)
        if isinstance(x, Sum) and x.pending and groups == 1:
            out, total = norm(as_tokens(resolved(x.a)), second=as_tokens(resolved(x.b)), mode="sum")
            x.done = total.view(x.shape)
            return out.view(x.shape)
        if isinstance(x, Gated) and x.pending:
            gate = as_tokens(resolved(x.gate))
            out, _ = norm(
                as_tokens(resolved(x.x)), second=gate, mode="gate_before", groups=groups, sigmoid=x.kind == "sigmoid"
            )
            return out.view(x.shape)
        x = resolved(x)
        if x.ndim == 4 and groups == 1:
            return HeadNorm(x, False, partial(head_norm, norm))
        return norm(as_tokens(x), groups=groups)[0].view(x.shape)

    def cast(self, x: Any, dtype: str) -> Any:
        x = resolved(x)
        return Cast(x) if dtype == "float32" and x.dtype != torch.float32 else super().cast(x, dtype)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _rope(self, x: Any, rope: Rope) -> Tensor:
        x = resolved(x)
        cosines, sines = self.rope_tables(x.shape[1], rope)
        return attention.rope(x, cosines, sines, rope.interleaved)

    def _cache_update(self, cache: Tensor, x: Any) -> Tensor:
        attention.cache_update(cache, resolved(x).to(cache.dtype), self.step)
        return cache

    def _block_cache_update(self, cache: Tensor, x: Any, block: int) -> Tensor:
        attention.cache_update(cache, resolved(x).to(cache.dtype), self.step, block)
        return cache

    def of_rows(self, cache: Tensor) -> Tensor:
        return cache.index_select(0, self.step[:, Step.SLOT].clamp(min=0))

    def _attention(
        self, q: Any, k: Tensor, v: Tensor, scale: float, window: int | None, selected: Tensor | None
    ) -> Tensor:
        q = resolved(q)
        wide, known = q.dtype == torch.float32, q.dtype == k.dtype in FLOATS
        shape = attention.AttentionShape(q.shape[2], k.shape[1], q.shape[3], v.shape[3], scale, window, wide)
        if selected is None and known and shape.suited and q.shape[1] <= MAX_VERIFY_TOKENS:
            return attention.decode_attention(shape, q, k, v, self.step, self.kv_len)
        return super()._attention(q, k, v, scale, window, selected)

    # ---- mixture of experts ------------------------------------------------------------------------------------------

    def route(self, logits: Any, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        logits = resolved(logits)
        most = logits.shape[-1] <= experts.MOST_EXPERTS and routing.top_k <= experts.MOST_CHOICES
        if not most or logits.dtype != torch.float32:
            return super().route(logits, bias, routing)
        flat, sizes = as_tokens(logits), (*logits.shape[:-1], routing.top_k)
        indices, weights = experts.route(flat.contiguous(), bias, **vars(routing))
        return indices.view(sizes), weights.view(sizes)

    def _experts(
        self,
        x: Any,
        indices: Tensor,
        weights: Tensor,
        up: Any,
        down: Any,
        activation: str,
        limit: Limit,
    ) -> Tensor:
        flat, chosen, share = as_tokens(resolved(x)), indices.flatten(0, -2), weights.flatten(0, -2)
        if activation in experts.ACTIVATIONS and experts.suited(flat, up, down, chosen.shape[1]):
            matrices = (dense(up), dense(down))
            out = experts.experts(
                flat, chosen.int().contiguous(), share.float().contiguous(), *matrices, activation, apart(limit)
            )
        else:
            out = masked_experts(self, flat, chosen, share, up, down, activation, limit)
        return out.view(x.shape)


#: Of float32 weights, the bfloat16 parts that ``wide_linear`` multiplies with.
PARTS = WeakTensorKeyDictionary()


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight^T`` in float32 of bfloat16 x ``[tokens, in]`` and float32 weight ``[out, in]``, by tensor cores.

    Three bfloat16 numbers hold the 24 bits of a float32 one, and the products are exact. Tensor cores sum them in float32,
    to a few parts in a million.
    """
    if weight not in PARTS:
        parts, rest = [], weight
        for _ in range(3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        PARTS[weight] = torch.cat(parts)
    products = torch.mm(x, PARTS[weight].t(), out_dtype=torch.float32)
    return products.view(len(x), 3, -1).sum(1)


def as_tokens(x: Tensor) -> Tensor:
    """``[rows, T, ...]`` as ``[rows * T, channels]``, without a copy where tokens lie evenly behind each other."""
    return x.flatten(2).flatten(0, 1) if x.ndim > 2 else x


def gated_product(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    return elementwise.gated(as_tokens(x), as_tokens(gate), kind == "sigmoid").view(x.shape)


def head_norm(norm: Any, x: Tensor, gate: Tensor | None = None, kind: str = "") -> Tensor:
    """The norm over each head of x ``[rows, T, H, D]``, times ``act(gate)`` where there is a gate ``[rows, T, H * D]``."""
    heads = x.shape[2]
    if gate is None:
        return norm(as_tokens(x), groups=heads)[0]
    return norm(as_tokens(x), second=as_tokens(gate), mode="gate_after", groups=heads, sigmoid=kind == "sigmoid")[0]
