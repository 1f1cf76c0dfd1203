"""Runs the op vocabulary at once on torch tensors: the embedded engine's backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trtllm_replayssm.network import scaled
from trtllm_replayssm.network.base import Network, Rope
from trtllm_replayssm.network.experts import looped_experts
from trtllm_replayssm.network.gated import Limit
from trtllm_replayssm.network.ngram import NgramHash, ngram_rows
from trtllm_replayssm.network.packed import PackedWeight, StoredWeight, dense
from trtllm_replayssm.network.selection import blocks_of_tokens, select_blocks, update_block_cache
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.implementation import Implementation, implementation
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda x: F.relu(x).square(),
    "signed_root": lambda x: x.sign() * x.abs().clamp(min=1e-6).sqrt(),
}


class TorchNetwork(Network):
    """One step on torch tensors.

    weights: the rank's tensors by name; those of linear layers and experts may be PackedWeight.
    pools: state tensors by name, bound so that row r is slot ``step[r, SLOT]``.
    step: int32 ``[rows, STEP_WORDS]`` (plugins.cursors.Step). activation: dtype of the residual stream.
    kv_len: positions of the KV cache that any row of this step can see; a host-side upper bound.
    group: the tensor-parallel process group, None with one rank.
    plugins: who computes the plugin layers; None for the CUDA kernels where ``step`` is on a CUDA device.
    scaled_matmul: multiply FP8 weights as they are, with activations rounded to FP8, where network.scaled can.
    """

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        pools: Mapping[str, Tensor],
        step: Tensor,
        activation: torch.dtype,
        kv_len: int,
        group: dist.ProcessGroup | None = None,
        plugins: Implementation | None = None,
        scaled_matmul: bool = False,
    ) -> None:
        self.weights, self.pools, self.step, self.dtype = weights, pools, step, activation
        self.kv_len, self.group, self.scaled_matmul = kv_len, group, scaled_matmul
        self.plugins = plugins or implementation("auto", step.device)
        self.tp_size = 1 if group is None else group.size()
        self.tables: dict[tuple[int, Rope], tuple[Tensor, Tensor]] = {}

    # Not every step asks for them, and on a GPU each is a launch.

    @cached_property
    def live(self) -> Tensor:
        return self.step[:, Step.SLOT] >= 0

    @cached_property
    def committed(self) -> Tensor:
        return self.step[:, Step.COMMITTED].long()

    @cached_property
    def query_len(self) -> Tensor:
        return self.step[:, Step.QUERY_LEN].long()

    def shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def weight(self, name: str) -> Any:
        return self.weights[name]

    def pool(self, name: str) -> Tensor:
        return self.pools[name]

    # ---- dense ops ---------------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids.long(), table.flatten(0, -2)).to(self.dtype)

    def _linear(self, x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
        if (
            self.scaled_matmul
            and isinstance(weight, PackedWeight)
            and scaled.suited(weight.packing, weight.shape, weight.dtype)
        ):
            out = scaled.scaled_linear(x, weight)
            return out if bias is None else out + bias.to(out.dtype)
        weight = dense(weight)
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))

    def _rms_norm(
        self, x: Tensor, weight: Tensor | None, epsilon: float, zero_centred: bool, groups: int, over_ranks: bool
    ) -> Tensor:
        wide = x.float().unflatten(-1, (groups, -1))
        mean = wide.square().mean(-1, keepdim=True)
        if over_ranks:
            mean = self.all_reduce(mean) / self.tp_size
        normed = (wide * (mean + epsilon).rsqrt()).flatten(-2)
        if weight is None:
            return normed.to(x.dtype)
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

    def offset(self, x: Tensor, amount: float) -> Tensor:
        return x + amount

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

    def _matmul(self, a: Tensor, b: Tensor, transpose_a: bool) -> Tensor:
        return (a.transpose(-1, -2) if transpose_a else a) @ b

    def _doubly_stochastic(self, x: Tensor, iterations: int, epsilon: float) -> Tensor:
        x = x.float().softmax(-1) + epsilon
        x = x / (x.sum(-2, keepdim=True) + epsilon)
        for _ in range(iterations - 1):
            x = x / (x.sum(-1, keepdim=True) + epsilon)
            x = x / (x.sum(-2, keepdim=True) + epsilon)
        return x

    def _ngram_ids(self, spec: NgramHash, token_ids: Tensor, cache: Tensor) -> Tensor:
        history = self.of_rows(self._cache_update(cache, token_ids[:, :, None, None]))[:, 0, :, 0]
        positions, end = self._positions(token_ids.shape[1]), spec.end_token
        tokens, text = [token_ids.long()], torch.ones_like(positions, dtype=torch.bool)
        for back in range(1, spec.size):
            before = history.gather(1, (positions - back).clamp(0, history.shape[1] - 1)).long()
            text = text & (positions >= back) & (before != end)
            tokens.append(torch.where(text, before, end))
        return ngram_rows(spec, tokens).int()

    def select_last(self, x: Tensor) -> Tensor:
        last = (self.query_len - 1).clamp(min=0)
        return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))

    # ---- attention ---------------------------------------------------------------------------------------------------

    def of_rows(self, cache: Tensor) -> Tensor:
        """The part of a pool that belongs to each row of the step."""
        return cache

    def _positions(self, tokens: int) -> Tensor:
        return self.committed[:, None] + torch.arange(tokens, device=self.step.device)

    def rope_tables(self, tokens: int, rope: Rope) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens' angles, float32 ``[rows, T, dim / 2]``; computed once for all layers."""
        if (tokens, rope) not in self.tables:
            exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=self.step.device) / rope.dim
            angles = (self._positions(tokens) + rope.shift)[..., None].float() / rope.theta**exponent
            self.tables[tokens, rope] = angles.cos(), angles.sin()
        return self.tables[tokens, rope]

    def _rope(self, x: Tensor, rope: Rope) -> Tensor:
        rotated, rest = x[..., : rope.dim].float(), x[..., rope.dim :]
        cos, sin = (table[:, :, None] for table in self.rope_tables(x.shape[1], rope))
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

    def _block_cache_update(self, cache: Tensor, x: Tensor, block: int) -> Tensor:
        valid = self.live[:, None] & (torch.arange(x.shape[1], device=x.device) < self.query_len[:, None])
        return update_block_cache(cache, x, self._positions(x.shape[1]), valid, block)

    def _select_blocks(self, q: Tensor, keys: Tensor, weights: Tensor | None, block: int, count: int) -> Tensor | None:
        blocks = self.kv_len // block
        if blocks <= count:
            return None
        positions = self._positions(q.shape[1])
        chosen = select_blocks(q, self.of_rows(keys[:, :, :blocks])[:, 0], weights, positions, block, count)
        return blocks_of_tokens(chosen, positions, block, self.kv_len)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, selected: Tensor | None
    ) -> Tensor:
        k, v = (self.of_rows(cache[:, :, : self.kv_len]) for cache in (k, v))
        keys, positions = torch.arange(k.shape[2], device=q.device), self._positions(q.shape[1])[..., None]
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        if selected is not None:
            visible &= selected
        # What lies behind the live positions may be anything, also NaN: select, never multiply by zero.
        written = self.live[:, None] & (keys < (self.committed + self.query_len)[:, None])
        zero = torch.zeros((), dtype=k.dtype, device=k.device)
        k, v = (torch.where(written[:, None, :, None], cache, zero) for cache in (k, v))
        seen = visible & written[:, None]
        # A row of padding sees one key of zeros: a softmax over nothing is no number.
        seen[..., 0] |= ~self.live[:, None]
        # The query heads of a key/value head stand behind each other like tokens, so that its keys are not copied for each.
        group, (rows, tokens) = q.shape[2] // k.shape[1], q.shape[:2]
        grouped = q.transpose(1, 2).reshape(rows, k.shape[1], group * tokens, -1)
        mask = seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
        out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale)
        return out.reshape(rows, -1, tokens, v.shape[-1]).transpose(1, 2)

    # ---- mixture of experts ------------------------------------------------------------------------------------------

    def softmax(self, x: Tensor) -> Tensor:
        return x.float().softmax(-1)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = x.topk(k, -1)
        return values, indices.int()

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.gather(-1, indices.long())

    def sum(self, x: Tensor, axis: int = -1) -> Tensor:
        return x.sum(axis, keepdim=True)

    def mask_groups(self, scores: Tensor, groups: Tensor, n_group: int) -> Tensor:
        kept = torch.zeros(*scores.shape[:-1], n_group, dtype=torch.bool, device=scores.device)
        kept.scatter_(-1, groups.long(), True)
        return scores.masked_fill(~kept.repeat_interleave(scores.shape[-1] // n_group, -1), float("-inf"))

    def _experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: StoredWeight,
        down: StoredWeight,
        activation: str,
        limit: Limit,
    ) -> Tensor:
        flat, chosen, share = (t.flatten(0, -2) for t in (x, indices, weights))
        return looped_experts(self, flat, chosen, share, up, down, activation, limit).view(x.shape)

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
