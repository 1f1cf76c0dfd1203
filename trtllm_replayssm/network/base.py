"""``Network``: the ops a model may use. Shape rules are checked here, once, for every backend.

Activations are ``[rows, T, ...]``: ``rows`` requests with ``T`` tokens each. Weights are fetched by name; state tensors are
fetched with ``pool`` and are changed in place by the ops that take them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trtllm_replayssm.network.gated import GATED, Limit
from trtllm_replayssm.network.ngram import NgramHash
from trtllm_replayssm.network.routing import Routing, composed_route
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: A backend's tensor: ``torch.Tensor`` when running, a wrapped network tensor when emitting TensorRT layers.
Tensor = Any
#: A size that is only known when the step runs (rows, T).
DYNAMIC = -1

Activation = Literal["silu", "sigmoid", "tanh", "relu2", "signed_root"]
MlpActivation = Literal["swiglu", "clamped_swiglu", "situ", "relu2"]


class ShapeError(ValueError):
    """An op was given tensors that do not fit; the message names the op and the shapes."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first ``dim`` channels of a head.

    theta: base of the frequencies ``theta ** (-2 i / dim)``.
    interleaved: pairs are channels (2i, 2i+1); otherwise (i, i + dim/2).
    shift: added to the positions of tokens; what comes out below 0 is of no use to anyone.
    """

    dim: int
    theta: float
    interleaved: bool = False
    shift: int = 0


def same(a: int, b: int) -> bool:
    """Whether two sizes can be equal; a DYNAMIC size fits everything."""
    return a == b or DYNAMIC in (a, b)


class Network(ABC):
    """Ops with exact meanings. Sizes of heads, channels and weights are static; rows and T may be DYNAMIC."""

    #: Ranks of the tensor-parallel group.
    tp_size: int = 1

    # ---- what a backend provides -------------------------------------------------------------------------------------

    @abstractmethod
    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Sizes of ``x``, DYNAMIC where unknown."""

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """The rank's weight of that name, as stored."""

    @abstractmethod
    def pool(self, name: str) -> Tensor:
        """A state tensor ``[rows or slots, ...]`` of that name, bound for this step."""

    def require(self, op: str, condition: bool, **tensors: Tensor) -> None:
        if not condition:
            shapes = ", ".join(f"{name} {list(self.shape(t))}" for name, t in tensors.items() if t is not None)
            raise ShapeError(f"{op}: shapes do not fit: {shapes}")

    # ---- dense ops ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``table[token_ids]``: ids ``[rows, T, ...]`` int32; table ``[vocab, hidden]`` or ``[parts, vocab/parts, hidden]``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight^T + bias``: x ``[..., in]``, weight ``[out, in]``, bias ``[out]``; the result has x's dtype.

        x is cast to the weight's dtype first, so a float32 router stays float32; use ``cast`` to come back.
        """
        out, width = self.shape(weight)
        self.require("linear", same(self.shape(x)[-1], width), x=x, weight=weight)
        if bias is not None:
            self.require("linear", self.shape(bias) == (out,), weight=weight, bias=bias)
        return self._linear(x, weight, bias)

    @abstractmethod
    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        epsilon: float,
        zero_centred: bool = False,
        groups: int = 1,
        over_ranks: bool = False,
    ) -> Tensor:
        """``x / sqrt(mean(x^2) + epsilon) * w`` over the last axis, in float32; w is ``1 + weight`` if zero_centred.

        The mean is taken in ``groups`` equal parts of the axis; weight spans the axis ``[width]`` or one part. over_ranks:
        the axis is divided over the ranks, each of which has an equal part of it; the mean is over all of them. Without a
        weight, w is 1.
        """
        width = self.shape(x)[-1]
        fits = width % groups == 0 and (weight is None or self.shape(weight) == (width,))
        self.require("rms_norm", fits, x=x, weight=weight)
        return self._rms_norm(x, weight, epsilon, zero_centred, groups, over_ranks and self.tp_size > 1)

    @abstractmethod
    def _rms_norm(
        self, x: Tensor, weight: Tensor | None, epsilon: float, zero_centred: bool, groups: int, over_ranks: bool
    ) -> Tensor: ...

    @abstractmethod
    def activation(self, x: Tensor, kind: Activation) -> Tensor:
        """silu ``x sigmoid(x)``, sigmoid, tanh, relu2 ``max(x, 0)^2``, or signed_root ``sign(x) sqrt(max(|x|, 1e-6))``.

        The result has x's dtype.
        """

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b`` with broadcasting of size-1 axes; equal ranks."""
        self._broadcastable("add", a, b)
        return self._add(a, b)

    @abstractmethod
    def _add(self, a: Tensor, b: Tensor) -> Tensor: ...

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x + bias`` over the last axis: bias ``[width]``; the result has x's dtype."""
        self.require("add_bias", self.shape(bias) == self.shape(x)[-1:], x=x, bias=bias)
        return self._add_bias(x, bias)

    @abstractmethod
    def _add_bias(self, x: Tensor, bias: Tensor) -> Tensor: ...

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """``a * b`` with broadcasting of size-1 axes; equal ranks."""
        self._broadcastable("multiply", a, b)
        return self._multiply(a, b)

    @abstractmethod
    def _multiply(self, a: Tensor, b: Tensor) -> Tensor: ...

    def _broadcastable(self, op: str, a: Tensor, b: Tensor) -> None:
        left, right = self.shape(a), self.shape(b)
        fits = len(left) == len(right) and all(same(m, n) or 1 in (m, n) for m, n in zip(left, right))
        self.require(op, fits, a=a, b=b)

    @abstractmethod
    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``factor * x``."""

    @abstractmethod
    def offset(self, x: Tensor, amount: float) -> Tensor:
        """``x + amount``."""

    @abstractmethod
    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        """``min(max(x, low), high)``; infinite bounds leave that side open."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: Literal["activation", "float32"]) -> Tensor:
        """x in float32, or in the model's activation dtype."""

    @abstractmethod
    def cast_like(self, x: Tensor, other: Tensor) -> Tensor:
        """x in the dtype of other."""

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Consecutive pieces of the last axis."""
        self.require(f"split into {list(sizes)}", sum(sizes) == self.shape(x)[-1], x=x)
        return self._split(x, sizes)

    @abstractmethod
    def _split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]: ...

    def slice_last(self, x: Tensor, size: int) -> Tensor:
        """The first ``size`` channels of the last axis."""
        width = self.shape(x)[-1]
        self.require(f"slice_last to {size}", size <= width, x=x)
        return x if size == width else self.split(x, (size, width - size))[0]

    @abstractmethod
    def concat(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Along the last axis."""

    def unflatten(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The last axis as ``sizes``: ``[rows, T, H*D]`` to ``[rows, T, H, D]``; one size may be -1."""
        width, known = self.shape(x)[-1], math.prod(n for n in sizes if n != -1)
        fits = width % known == 0 if -1 in sizes else width == known
        self.require(f"unflatten to {list(sizes)}", fits, x=x)
        return self._unflatten(x, sizes)

    @abstractmethod
    def _unflatten(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor: ...

    def flatten(self, x: Tensor, axes: int = 2) -> Tensor:
        """The last ``axes`` axes as one; their sizes are static."""
        self.require("flatten", DYNAMIC not in self.shape(x)[-axes:], x=x)
        return self._flatten(x, axes)

    @abstractmethod
    def _flatten(self, x: Tensor, axes: int) -> Tensor: ...

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Batched ``x @ weight^T`` per head: x ``[rows, T, H, in]``, weight ``[H, out, in]`` to ``[rows, T, H, out]``."""
        heads, _, width = self.shape(weight)
        self.require("per_head", self.shape(x)[-2:] == (heads, width), x=x, weight=weight)
        return self._per_head(x, weight)

    @abstractmethod
    def _per_head(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def matmul(self, a: Tensor, b: Tensor, transpose_a: bool = False) -> Tensor:
        """``a @ b``, or ``a^T @ b``, over the last two axes: ``[rows, T, m, k]`` and ``[rows, T, k, n]``, of one dtype."""
        depth = self.shape(a)[-2 if transpose_a else -1]
        self.require("matmul", len(self.shape(a)) == len(self.shape(b)) and depth == self.shape(b)[-2], a=a, b=b)
        return self._matmul(a, b, transpose_a)

    @abstractmethod
    def _matmul(self, a: Tensor, b: Tensor, transpose_a: bool) -> Tensor: ...

    def doubly_stochastic(self, x: Tensor, iterations: int, epsilon: float) -> Tensor:
        """Sinkhorn-Knopp on ``softmax(x) + epsilon`` of matrices x ``[rows, T, n, n]``, in float32, result float32.

        Columns are divided by their sums, then ``iterations - 1`` times rows and columns; epsilon is added to every sum.
        """
        self.require("doubly_stochastic", self.shape(x)[-1] == self.shape(x)[-2], x=x)
        return self._doubly_stochastic(x, iterations, epsilon)

    @abstractmethod
    def _doubly_stochastic(self, x: Tensor, iterations: int, epsilon: float) -> Tensor: ...

    # ---- n-grams -----------------------------------------------------------------------------------------------------

    def ngram_ids(self, spec: NgramHash, token_ids: Tensor, cache: Tensor) -> Tensor:
        """Rows of hashed n-gram tables (ngram.py) int32 ``[rows, T, (size - 1) * heads]``.

        token_ids: int32 ``[rows, T]``, which are written at positions ``committed ...`` of ``cache [rows, 1, max_seq, 1]``
        (int32).
        """
        fits = self.shape(cache)[1] == self.shape(cache)[3] == 1 and len(self.shape(token_ids)) == 2
        self.require("ngram_ids", fits, token_ids=token_ids, cache=cache)
        return self._ngram_ids(spec, token_ids, cache)

    @abstractmethod
    def _ngram_ids(self, spec: NgramHash, token_ids: Tensor, cache: Tensor) -> Tensor: ...

    # ---- attention ---------------------------------------------------------------------------------------------------

    def rope(self, x: Tensor, rope: Rope) -> Tensor:
        """Rotate x ``[rows, T, H, D]`` by the tokens' positions ``committed + i``, in float32; result in x's dtype."""
        self.require(f"rope over {rope.dim} channels", rope.dim % 2 == 0 and self.shape(x)[-1] >= rope.dim, x=x)
        return self._rope(x, rope)

    @abstractmethod
    def _rope(self, x: Tensor, rope: Rope) -> Tensor: ...

    def cache_update(self, cache: Tensor, x: Tensor) -> Tensor:
        """Write x ``[rows, T, H, D]`` at positions ``committed ...`` of ``cache [rows, H, max_seq, D]``; returns the cache."""
        fits = self.shape(cache)[1] == self.shape(x)[2] and self.shape(cache)[3] == self.shape(x)[3]
        self.require("cache_update", fits, cache=cache, x=x)
        return self._cache_update(cache, x)

    @abstractmethod
    def _cache_update(self, cache: Tensor, x: Tensor) -> Tensor: ...

    def block_cache_update(self, cache: Tensor, x: Tensor, block: int) -> Tensor:
        """Keep what stands at the last token of every block of ``block`` positions; returns the cache.

        x ``[rows, T, H, D]`` belongs to positions ``committed ...``; position p goes to row ``p // block`` of ``cache
        [rows, H, blocks, D]`` if ``(p + 1) % block == 0``, and nowhere else. Rows of blocks that the step's tokens begin and
        do not end may hold anything afterwards.
        """
        fits = self.shape(cache)[1] == self.shape(x)[2] and self.shape(cache)[3] == self.shape(x)[3]
        self.require("block_cache_update", fits, cache=cache, x=x)
        return self._block_cache_update(cache, x, block)

    @abstractmethod
    def _block_cache_update(self, cache: Tensor, x: Tensor, block: int) -> Tensor: ...

    def select_blocks(self, q: Tensor, keys: Tensor, weights: Tensor | None, block: int, count: int) -> Tensor | None:
        """Which positions a token attends to, for ``attention``: None for all.

        q ``[rows, T, H, D]``, keys ``[rows, 1, blocks, D]`` of ``block_cache_update``, weights float32 ``[rows, T, H]`` or None
        for 1. A token sees the ``count`` blocks of most ``sum_h weights_h relu(q_h . key)`` (float32; of equal ones, the
        earlier) among those that end at or before it, and the tokens behind the last of these up to itself.
        """
        fits = self.shape(keys)[1] == 1 and self.shape(keys)[3] == self.shape(q)[3]
        fits = fits and (weights is None or self.shape(weights)[-1] == self.shape(q)[2])
        self.require("select_blocks", fits, q=q, keys=keys, weights=weights)
        return self._select_blocks(q, keys, weights, block, count)

    @abstractmethod
    def _select_blocks(
        self, q: Tensor, keys: Tensor, weights: Tensor | None, block: int, count: int
    ) -> Tensor | None: ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over a slot's cache: token i sees positions ``0 ... committed + i``, of them the last ``window``.

        q ``[rows, T, H, D]``, k ``[rows, Hkv, max_seq, D]``, v ``[rows, Hkv, max_seq, Dv]``; query head h reads cache head
        ``h // (H/Hkv)``; softmax in float32. selected: of ``select_blocks``, the positions that are seen at all. Returns
        ``[rows, T, H, Dv]``.
        """
        heads, kv_heads = self.shape(q)[2], self.shape(k)[1]
        fits = heads % kv_heads == 0 and self.shape(q)[3] == self.shape(k)[3] and self.shape(v)[1] == kv_heads
        self.require("attention", fits, q=q, k=k, v=v)
        return self._attention(q, k, v, scale, window, selected)

    @abstractmethod
    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, selected: Tensor | None
    ) -> Tensor: ...

    # ---- mixture of experts ------------------------------------------------------------------------------------------

    @abstractmethod
    def softmax(self, x: Tensor) -> Tensor:
        """Over the last axis, in float32, result float32."""

    @abstractmethod
    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of the last axis: values and int32 indices, both ``[..., k]``, largest first."""

    @abstractmethod
    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """``x[..., indices]`` along the last axis."""

    @abstractmethod
    def sum(self, x: Tensor, axis: int = -1) -> Tensor:
        """Over one of the last axes (negative), which stays with size 1."""

    @abstractmethod
    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        """``a / b`` with broadcasting of size-1 axes."""

    @abstractmethod
    def mask_groups(self, scores: Tensor, groups: Tensor, n_group: int) -> Tensor:
        """scores ``[..., E]`` with ``-inf`` outside the groups ``[..., kept]`` (int32) of ``E / n_group`` experts each."""

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        """Indices (int32) and weights (float32) ``[..., top_k]`` of each token's experts, from float32 logits ``[..., E]``.

        bias: ``[E]``, added to the scores of a sigmoid router for the choice alone.
        """
        experts = self.shape(logits)[-1]
        fits = (bias is None or self.shape(bias) == (experts,)) and routing.top_k <= experts
        self.require(f"route to {routing.top_k}", fits and experts % routing.n_group == 0, logits=logits, bias=bias)
        return composed_route(self, logits, bias, routing)

    def experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        activation: MlpActivation,
        limit: Limit = None,
    ) -> Tensor:
        """``sum_j weights_j expert_{indices_j}(x)`` for x ``[rows, T, D]``; indices and weights ``[rows, T, k]``.

        An activation of gated.py, with its limit: up ``[E, 2F, D]`` holds gate rows, then up rows. relu2: up ``[E, F, D]``.
        down ``[E, D, F]``. Result in x's dtype.
        """
        n, rows, width = self.shape(up)
        inner = rows // 2 if activation in GATED else rows
        self.require(
            "experts", self.shape(x)[-1] == width and self.shape(down) == (n, width, inner), x=x, up=up, down=down
        )
        return self._experts(x, indices, weights, up, down, activation, limit)

    @abstractmethod
    def _experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        activation: str,
        limit: Limit,
    ) -> Tensor: ...

    # ---- tensor parallelism ------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; x itself with one rank."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' x one behind the other along the last axis; x itself with one rank."""

    @abstractmethod
    def select_last(self, x: Tensor) -> Tensor:
        """The tokens whose logits the step is for: ``[rows, T, D]`` to ``[rows, L, D]``.

        Each row's last valid token (L = 1), unless the backend was told others.
        """

    # ---- plugin layers; the contracts are in plugins/ ----------------------------------------------------------------

    def _require_pools(
        self, op: str, attributes: Mamba2Attributes | GatedDeltaAttributes | KdaAttributes, pools: dict[str, Tensor]
    ) -> None:
        any_dtype = torch.float32
        for name, pool in attributes.pools(any_dtype, any_dtype, any_dtype).items():
            fits = self.shape(pools[name])[1:] == pool.shape
            self.require(f"{op} with slots of {list(pool.shape)}", fits, **{name: pools[name]})

    def causal_conv(
        self, attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, conv_ring: Tensor
    ) -> Tensor:
        """``replayssm::causal_conv``."""
        a = attributes
        fits = self.shape(x)[-1] == a.channels and self.shape(weight) == (a.channels, a.kernel)
        self.require("causal_conv", fits, x=x, weight=weight)
        self.require("causal_conv", self.shape(conv_ring)[1:] == (a.conv_rows, a.channels), conv_ring=conv_ring)
        self.require("causal_conv", bias is None or self.shape(bias) == (a.channels,), x=x, bias=bias)
        return self._causal_conv(attributes, x, weight, bias, conv_ring)

    @abstractmethod
    def _causal_conv(
        self, attributes: CausalConvAttributes, x: Tensor, weight: Tensor, bias: Tensor | None, conv_ring: Tensor
    ) -> Tensor: ...

    def mamba2(
        self,
        attributes: Mamba2Attributes,
        xbc: Tensor,
        dt: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        D: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        """``replayssm::mamba2``."""
        a = attributes
        width = a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size
        self.require("mamba2", self.shape(xbc)[-1] == width and self.shape(dt)[-1] == a.num_heads, xbc=xbc, dt=dt)
        per_head = (a.num_heads,)
        self.require(
            "mamba2", all(self.shape(t) == per_head for t in (A_log, dt_bias, D)), A_log=A_log, dt_bias=dt_bias, D=D
        )
        self._require_pools("mamba2", attributes, pools)
        return self._mamba2(attributes, xbc, dt, A_log, dt_bias, D, pools)

    @abstractmethod
    def _mamba2(
        self,
        attributes: Mamba2Attributes,
        xbc: Tensor,
        dt: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        D: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor: ...

    def gated_delta(
        self,
        attributes: GatedDeltaAttributes,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        """``replayssm::gated_delta``."""
        n = attributes
        width = 2 * n.num_key_heads * n.key_dim + n.num_value_heads * n.value_dim
        heads = n.num_value_heads
        fits = self.shape(qkv)[-1] == width and self.shape(a)[-1] == heads and self.shape(b)[-1] == heads
        self.require("gated_delta", fits, qkv=qkv, a=a, b=b)
        fits = self.shape(A_log) == (heads,) and self.shape(dt_bias) == (heads,)
        self.require("gated_delta", fits, A_log=A_log, dt_bias=dt_bias)
        self._require_pools("gated_delta", attributes, pools)
        return self._gated_delta(attributes, qkv, a, b, A_log, dt_bias, pools)

    @abstractmethod
    def _gated_delta(
        self,
        attributes: GatedDeltaAttributes,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor: ...

    def kda(
        self,
        attributes: KdaAttributes,
        qkv: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor:
        """``replayssm::kda``."""
        n = attributes
        width = n.num_heads * (2 * n.key_dim + n.value_dim)
        decays = n.num_heads * n.key_dim
        fits = self.shape(qkv)[-1] == width and self.shape(f)[-1] == decays and self.shape(b)[-1] == n.num_heads
        self.require("kda", fits, qkv=qkv, f=f, b=b)
        fits = self.shape(A_log) == (n.num_heads,) and self.shape(dt_bias) == (decays,)
        self.require("kda", fits, A_log=A_log, dt_bias=dt_bias)
        self._require_pools("kda", attributes, pools)
        return self._kda(attributes, qkv, f, b, A_log, dt_bias, pools)

    @abstractmethod
    def _kda(
        self,
        attributes: KdaAttributes,
        qkv: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        pools: dict[str, Tensor],
    ) -> Tensor: ...
