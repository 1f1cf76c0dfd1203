"""Positions, rotary embedding, KV cache and attention, from one step's info."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor
from trtllm_replayssm.plugins.cursors import Step


def step_wide(make: Callable[[StepPositions], Tensor]) -> cached_property[Tensor]:
    """A tensor that is made once, when it is first asked for, and belongs to the step, not to the layer that asked."""

    def made(self: StepPositions) -> Tensor:
        with self.emitter.scoped("step"):
            return make(self)

    return cached_property(made)


class StepPositions:
    """Where the tokens of a step stand, for all layers alike.

    step: int32 ``[rows, STEP_WORDS]``. tokens: int32 ``[rows, T]``, whose sizes are those of the step. cache_rows:
    positions of the KV cache; no position is beyond them.
    """

    def __init__(self, emitter: Emitter, step: Tensor, tokens: Tensor, cache_rows: int) -> None:
        self.emitter, self.step, self.token_ids, self.cache_rows = emitter, step, tokens, cache_rows
        self._rotations: dict[Rope, tuple[Tensor, Tensor]] = {}
        self._windows: dict[int, Tensor] = {}

    def column(self, column: Step) -> Tensor:
        """One word of every row's info, ``[rows, 1]``."""
        return self.emitter.slice(self.step, 1, int(column), 1)

    @step_wide
    def committed(self) -> Tensor:
        return self.column(Step.COMMITTED)

    @step_wide
    def tokens(self) -> Tensor:
        """T, int64 ``[1]``."""
        return self.emitter.size(self.token_ids, 1)

    @step_wide
    def positions(self) -> Tensor:
        """``committed + i``, int32 ``[rows, T]``. Padding may lie beyond the cache; it is moved back to its end."""
        e = self.emitter
        offsets = e.reshape(e.dynamic_arange(self.tokens), (1, -1))
        return e.binary("MIN", e.binary("SUM", self.committed, offsets), e.number(self.cache_rows - 1, torch.int32, 2))

    @step_wide
    def causal(self) -> Tensor:
        """Cache rows that a token may see: bool ``[rows, 1, T, cache_rows]``, ``key <= committed + i``."""
        e = self.emitter
        beyond = e.binary("GREATER", e.arange(self.cache_rows, 4), e.reshape(self.positions, (0, 1, -1, 1)))
        return e.unary("NOT", beyond)

    def visible(self, window: int | None) -> Tensor:
        """Cache rows that a token sees: of those that it may see, the last ``window``."""
        if window is None:
            return self.causal
        if window not in self._windows:
            with self.emitter.scoped("step"):
                self._windows[window] = self.within(window)
        return self._windows[window]

    def within(self, window: int) -> Tensor:
        """``committed + i - window < key <= committed + i``."""
        e = self.emitter
        first = e.binary("SUB", e.reshape(self.positions, (0, 1, -1, 1)), e.number(window, torch.int32, 4))
        recent = e.binary("GREATER", e.arange(self.cache_rows, 4), first)
        return e.binary("AND", self.causal, recent)

    @step_wide
    def lengths(self) -> Tensor:
        """Cache rows that any token of a row sees, int32 ``[rows]``."""
        e = self.emitter
        return e.reshape(e.binary("SUM", e.reduce("MAX", self.positions, 1), e.number(1, torch.int32, 2)), (-1,))

    @step_wide
    def write_start(self) -> Tensor:
        """Cache row of a row's first token, int32 ``[rows]``.

        A padding row writes its T tokens as well. They go to the end of the cache: a step has at most verify_tokens of
        them there, and those rows are beyond every position that a request may still read.
        """
        return self.row_of(self.committed, self.cache_rows, self.tokens)

    def row_of(self, first: Tensor, cache_rows: int, count: Tensor) -> Tensor:
        """``first [rows, 1]`` as int32 ``[rows]``, for padding rows the last ``count`` (int64 ``[1]``) of the cache's rows."""
        e = self.emitter
        last = e.number(cache_rows, torch.int32, 1)
        end = e.reshape(e.binary("SUB", last, e.cast(count, torch.int32)), (1, 1))
        padding = e.binary("LESS", self.column(Step.SLOT), e.number(0, torch.int32, 2))
        return e.reshape(e.select(padding, end, first), (-1,))

    def rotation(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """cos and sin of every token's angles, float32 ``[rows, T, 1, dim/2]``.

        Looked up in tables that the host computes in float64: a device's own sine need not be exact at angles of 10^5.
        """
        if rope not in self._rotations:
            with self.emitter.scoped("step"):
                self._rotations[rope] = self.looked_up(rope)
        return self._rotations[rope]

    def looked_up(self, rope: Rope) -> tuple[Tensor, Tensor]:
        e = self.emitter
        frequencies = rope.theta ** (-torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
        positions = torch.arange(rope.shift, self.cache_rows + rope.shift, dtype=torch.float64)
        angles = positions[:, None] * frequencies
        cos, sin = (e.gather(e.constant(f(angles).float()), self.positions, 0) for f in (torch.cos, torch.sin))
        return e.reshape(cos, (0, 0, 1, -1)), e.reshape(sin, (0, 0, 1, -1))


def rotate(e: Emitter, where: StepPositions, x: Tensor, rope: Rope) -> Tensor:
    """``Network.rope``, in float32."""
    cos, sin = where.rotation(rope)
    width, half, dtype = x.shape[-1], rope.dim // 2, e.dtype(x)
    turning = e.cast(x if rope.dim == width else e.slice(x, 3, 0, rope.dim), torch.float32)
    if rope.interleaved:
        pairs = e.reshape(turning, (0, 0, 0, half, 2))
        a, b = (e.reshape(e.slice(pairs, 4, i, 1), (0, 0, 0, half)) for i in (0, 1))
    else:
        a, b = e.slice(turning, 3, 0, half), e.slice(turning, 3, half, half)
    first = e.binary("SUB", e.binary("PROD", a, cos), e.binary("PROD", b, sin))
    second = e.binary("SUM", e.binary("PROD", b, cos), e.binary("PROD", a, sin))
    if rope.interleaved:
        parts = (e.reshape(part, (0, 0, 0, half, 1)) for part in (first, second))
        turned = e.reshape(e.concat(tuple(parts), 4), (0, 0, 0, rope.dim))
    else:
        turned = e.concat((first, second), 3)
    turned = e.cast(turned, dtype)
    return turned if rope.dim == width else e.concat((turned, e.slice(x, 3, rope.dim, width - rope.dim)), 3)


def update_cache(e: Emitter, where: StepPositions, cache: Tensor, x: Tensor) -> Tensor:
    """``Network.cache_update``."""
    x = e.transpose(e.cast(x, e.dtype(cache)), (0, 2, 1, 3))
    return write_rows(e, cache, x, where.write_start, where.tokens)


def write_rows(e: Emitter, cache: Tensor, x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """``cache [rows, H, n, D]`` with x ``[rows, H, count, D]`` in the rows ``start ...`` (int32 ``[rows]``) of each request.

    In place by the native layer, which takes no integers.
    """
    if e.tensorrt.features.kv_cache_update and e.dtype(cache).is_floating_point:
        layer = e.network.add_kv_cache_update(cache, x, start, e.trt.KVCacheMode.LINEAR)
        return e.added(layer, "cache_update", cache, x)
    return scatter_rows(e, cache, x, start, count)


def scatter_rows(e: Emitter, cache: Tensor, x: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """``write_rows`` by a scatter, which copies the whole cache."""
    # Where each [row, head, token] goes: (row, head, start + token).
    rows, heads = e.size(x, 0), x.shape[1]
    row = e.reshape(e.dynamic_arange(rows), (-1, 1, 1, 1))
    head = e.reshape(e.arange(heads, 1), (1, heads, 1, 1))
    token = e.reshape(e.dynamic_arange(count), (1, 1, -1, 1))
    position = e.binary("SUM", e.reshape(start, (-1, 1, 1, 1)), token)
    zero = e.binary("PROD", e.binary("SUM", position, head), e.number(0, torch.int32, 4))
    index = e.concat([e.binary("SUM", part, zero) for part in (row, head, position)], 3)
    return e.scatter_nd(cache, index, x)


def attend(
    e: Emitter,
    where: StepPositions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    selected: Tensor | None,
) -> Tensor:
    """``Network.attention``. Cache rows beyond a token's position weigh zero; they must hold finite numbers."""
    query = e.transpose(e.binary("PROD", q, e.scalar(scale, q)), (0, 2, 1, 3))
    fused = q.shape[3] == v.shape[3]
    attention = fused_attention if fused else plain_attention
    visible = where.visible(window)
    mask = visible if selected is None else e.binary("AND", visible, selected)
    return e.transpose(attention(e, where, query, k, v, mask), (0, 2, 1, 3))


def fused_attention(e: Emitter, where: StepPositions, query: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    lengths = where.lengths if e.tensorrt.features.attention_lengths else None
    layer = e.named(e.tensorrt.add_attention(e.network, query, k, v), "attention", query, k, v)
    layer.mask = mask
    layer.decomposable = True
    if lengths is not None:
        layer.key_value_lengths = lengths
    return layer.get_output(0)


def plain_attention(e: Emitter, where: StepPositions, query: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """For values of another width than keys (latent attention), which the attention layer does not take."""
    heads, kv_heads, width, rows = query.shape[1], k.shape[1], v.shape[3], k.shape[2]
    group = heads // kv_heads
    # The query heads of one cache head side by side: [rows, kv_heads, group * T, D].
    grouped = e.reshape(query, (0, kv_heads, -1, query.shape[3]))
    scores = e.cast(e.matmul(grouped, k, transpose_b=True), torch.float32)
    scores = e.reshape(scores, (0, kv_heads, group, -1, rows))
    visible = e.reshape(mask, (0, 1, 1, -1, rows))
    scores = e.select(visible, scores, e.number(-math.inf, torch.float32, 5))
    weights = e.reshape(e.cast(e.softmax(scores), e.dtype(v)), (0, kv_heads, -1, rows))
    out = e.reshape(e.matmul(weights, v), (0, kv_heads, group, -1, width))
    # Back to [rows, heads, T, D]; T is what is left over.
    return e.reshape(out, (0, heads, -1, width))
