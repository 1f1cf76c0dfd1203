"""Runs the op vocabulary at once on torch tensors: the embedded engine's backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.network.base import Network, Rope
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.implementation import Implementation, implementation
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu2": lambda x: F.relu(x).square(),
}


class TorchNetwork(Network):
    """One step on torch tensors.

    weights: the rank's tensors by name. pools: state tensors by name, bound so that row r is slot ``step[r, SLOT]``.
    step: int32 ``[rows, STEP_WORDS]`` (plugins.cursors.Step). activation: dtype of the residual stream.
    kv_len: positions of the KV cache that any row of this step can see; a host-side upper bound.
    group: the tensor-parallel process group, None with one rank.
    plugins: who computes the plugin layers; None for the CUDA kernels where ``step`` is on a CUDA device.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        pools: Mapping[str, Tensor],
        step: Tensor,
        activation: torch.dtype,
        kv_len: int,
        group: dist.ProcessGroup | None = None,
        plugins: Implementation | None = None,
    ) -> None:
        self.weights, self.pools, self.step, self.dtype = weights, pools, step, activation
        self.kv_len, self.group = kv_len, group
        self.plugins = plugins or implementation("auto", step.device)
        self.tp_size = 1 if group is None else group.size()
        self.live = step[:, Step.SLOT] >= 0
        self.committed = step[:, Step.COMMITTED].long()
        self.query_len = step[:, Step.QUERY_LEN].long()

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def weight(self, name: str) -> Tensor:
        return self.weights[name]

    def pool(self, name: str) -> Tensor:
        return self.pools[name]

    # ---- dense ops ---------------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids.long(), table).to(self.dtype)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))

    def _rms_norm(
        self, x: Tensor, weight: Tensor, epsilon: float, zero_centred: bool, groups: int, over_ranks: bool
    ) -> Tensor:
        wide = x.float().unflatten(-1, (groups, -1))
        mean = wide.square().mean(-1, keepdim=True)
        if over_ranks:
            mean = self.all_reduce(mean) / self.tp_size
        normed = (wide * (mean + epsilon).rsqrt()).flatten(-2)
        return (normed * (1 + weight.float() if zero_centred else weight.float())).to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return ACTIVATIONS[kind](x)

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def _add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1 else x * factor

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(torch.float32 if dtype == "float32" else self.dtype)

    def cast_like(self, x: Tensor, other: Tensor) -> Tensor:
        return x.to(other.dtype)

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def _split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(list(sizes), -1)

    def concat(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(tensors, -1)

    def _unflatten(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return x.unflatten(-1, sizes)

    def _flatten(self, x: Tensor, axes: int) -> Tensor:
        return x.flatten(-axes)

    def _per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bthi,hoi->btho", x, weight)

    def select_last(self, x: Tensor) -> Tensor:
        last = (self.query_len - 1).clamp(min=0)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _positions(self, tokens: int) -> Tensor:
        return self.committed[:, None] + torch.arange(tokens, device=self.step.device)

    def _rope(self, x: Tensor, rope: Rope) -> Tensor:
        rotated, rest = x[..., : rope.dim].float(), x[..., rope.dim :]
        exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=x.device) / rope.dim
        angles = self._positions(x.shape[1])[..., None, None].float() / rope.theta**exponent
        cos, sin = angles.cos(), angles.sin()
        pairs = rotated.unflatten(-1, (-1, 2) if rope.interleaved else (2, -1))
        a, b = pairs.unbind(-1 if rope.interleaved else -2)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if rope.interleaved else -2)
        return torch.cat((turned.flatten(-2).to(x.dtype), rest), -1)

    def _cache_update(self, cache: Tensor, x: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[1], device=x.device)
        valid = self.live[:, None] & (tokens < self.query_len[:, None])
        rows, offsets = valid.nonzero(as_tuple=True)
        cache[rows, :, self.committed[rows] + offsets] = x[rows, offsets].to(cache.dtype)
        return cache

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        k, v = k[:, :, : self.kv_len], v[:, :, : self.kv_len]
        keys, positions = torch.arange(k.shape[2], device=q.device), self._positions(q.shape[1])[..., None]
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        # What lies behind the live positions may be anything, also NaN: select, never multiply by zero.
        written = self.live[:, None] & (keys < (self.committed + self.query_len)[:, None])
        v = torch.where(written[:, None, :, None], v, torch.zeros((), dtype=v.dtype, device=v.device))
        grouped = q.transpose(1, 2).unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("bghtd,bgsd->bghts", grouped.float(), k.float()) * scale
        scores = scores.masked_fill(~(visible & written[:, None])[:, None, None], float("-inf"))
        weights = scores.softmax(-1)
        weights = torch.where(self.live[:, None, None, None, None], weights, torch.zeros_like(weights))
        out = torch.einsum("bghts,bgsd->bghtd", weights, v.float())
        return out.flatten(1, 2).transpose(1, 2).to(q.dtype)

    # ---- mixture of experts ------------------------------------------------------------------------------------------

    def softmax(self, x: Tensor) -> Tensor:
        return x.float().softmax(-1)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(k, -1)
        return values, indices.int()

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.gather(-1, indices.long())

    def sum(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def mask_groups(self, scores: Tensor, groups: Tensor, n_group: int) -> Tensor:
        kept = torch.zeros(*scores.shape[:-1], n_group, dtype=torch.bool, device=scores.device)
        kept.scatter_(-1, groups.long(), True)
        return scores.masked_fill(~kept.repeat_interleave(scores.shape[-1] // n_group, -1), float("-inf"))

    def _experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        activation: str,
        limit: float | None,
    ) -> Tensor:
        flat, chosen = x.flatten(0, -2), indices.flatten(0, -2).long()
        share = weights.flatten(0, -2).float()
        out = torch.zeros(flat.shape, dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.linear(flat[token].to(up.dtype), up[expert])
            if activation == "swiglu":
                first, second = hidden.chunk(2, -1)
                hidden = self.swiglu(first, second, limit)
            else:
                hidden = F.relu(hidden).square()
            out.index_add_(0, token, F.linear(hidden, down[expert]).float() * share[token, place, None])
        return out.view(x.shape).to(x.dtype)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        gate = F.silu(gate)
        return gate * up if limit is None else gate.clamp(max=limit) * up.clamp(-limit, limit)

    # ---- tensor parallelism ------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.group is not None:
            x = x.contiguous()
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    # ---- plugin layers -----------------------------------------------------------------------------------------------

    def _causal_conv(
        self, attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, conv_ring: Tensor
    ) -> Tensor:
        return self.plugins.causal_conv(attributes, x, weight, bias, self.step, conv_ring)

    def _mamba2(
        self,
        attributes: Mamba2Attributes,
        xbc: Tensor,
        dt: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        D: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        return self.plugins.mamba2(attributes, xbc, dt, A_log, dt_bias, D, self.step, pools)

    def _gated_delta(
        self,
        attributes: GatedDeltaAttributes,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        return self.plugins.gated_delta(attributes, qkv, a, b, A_log, dt_bias, self.step, pools)

    def _kda(
        self,
        attributes: KdaAttributes,
        qkv: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        return self.plugins.kda(attributes, qkv, f, b, A_log, dt_bias, self.step, pools)
