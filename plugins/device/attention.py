"""Attention of the embedded engine's decode and verify steps on the GPU, with its rotation and KV cache.

Lengths are read on the device, so that a launch depends only on the number of rows and tokens, and on the keys that it is
sized for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride, token_stride

#: Keys that a block should have at least, and blocks that a device should be given: more in float32, whose blocks wait longer.
FEWEST_KEYS, BLOCKS_WANTED, WIDE_BLOCKS_WANTED = 128, 264, 528
#: Most channels of a value that a block sums.
MOST_VALUES = 256
#: Queries of a block's tile: rows of a tensor core's operand in 16 bits, registers of a lane in float32.
TILE, WIDE_TILE = 16, 8


def cache_update(cache: Tensor, x: Tensor, step: Tensor, block: int = 1) -> None:
    """Write x ``[rows, T, H, D]`` into ``cache [slots, H, positions, D]`` behind the committed tokens of each row's slot.

    block: only tokens that end one of so many positions are written, and one position of the cache stands for a block.
    """
    rows, tokens, heads, width = x.shape
    flat = x.flatten(2)
    stride, slots = token_stride(flat), slot_stride(cache)
    size = x.itemsize
    aligned = (flat.data_ptr(), cache.data_ptr(), stride * size, slots * size, width * size)
    vector = next(n for n in (16, 8, 4, 2) if all(value % n == 0 for value in aligned))
    kernel = cache_kernel(heads, width * size // vector, vector, block)
    items = tokens * heads * width * size // vector
    integers = (rows, tokens, stride * size // vector, cache.shape[2], slots * size // vector)
    launch(Launch(kernel, (-(-items // 128), rows, 1), integers), (flat, step), (cache,))


def cache_kernel(heads: int, width: int, vector: int, block: int = 1) -> Kernel:
    defines = (("HEADS", heads), ("WIDTH", width), ("VECTOR", vector), ("TOKENS_A_BLOCK", block))
    return Kernel("cache_update.cu", "cache_update", 128, defines)


def rope(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """x ``[rows, T, H, D]`` rotated by float32 tables ``[rows, T, dim / 2]``."""
    rows, tokens, heads, width = x.shape
    dim, flat = 2 * cosines.shape[-1], x.flatten(2)
    y = torch.empty(rows, tokens, heads, width, dtype=x.dtype, device=x.device)
    kernel = rope_kernel(x.dtype, heads, width, dim, interleaved)
    grid = (rows * tokens, -(-heads * (width - dim // 2) // 128), 1)
    launch(Launch(kernel, grid, (tokens, token_stride(flat))), (flat, cosines, sines), (y,))
    return y


def rope_kernel(dtype: torch.dtype, heads: int, width: int, dim: int, interleaved: bool) -> Kernel:
    shape = (("HEADS", heads), ("WIDTH", width), ("DIM", dim), ("INTERLEAVED", int(interleaved)))
    return Kernel("rope.cu", "rope", 128, (("ACT", CUDA_TYPES[dtype]), *shape))


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention layer on one rank. window: tokens that a token sees; None for all. wide: float32."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    scale: float
    window: int | None = None
    wide: bool = False

    def queries(self, tokens: int) -> int:
        """Of a block's tile."""
        return min(self.heads // self.kv_heads * tokens, WIDE_TILE) if self.wide else TILE

    def tiles(self, tokens: int) -> int:
        """Blocks of a row that read the same keys."""
        tiles = -(-self.heads // self.kv_heads * tokens // self.queries(tokens))
        return self.kv_heads * tiles * (self.value_width // self.value_tile)

    @property
    def value_tile(self) -> int:
        return min(self.value_width, MOST_VALUES)

    @property
    def suited(self) -> bool:
        """Whether the kernel takes it."""
        width, values = (4, 32) if self.wide else (32, 64)
        return self.width % width == 0 and self.value_tile % values == 0 and self.value_width % self.value_tile == 0

    def parts(self, rows: int, tokens: int, kv_len: int) -> int:
        """Into how many parts the keys are divided: enough for a busy device, none too short."""
        blocks = WIDE_BLOCKS_WANTED if self.wide else BLOCKS_WANTED
        wanted = -(-blocks // (rows * self.tiles(tokens)))
        return max(1, min(wanted, kv_len // FEWEST_KEYS))


def decode_attention(shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, step: Tensor, kv_len: int) -> Tensor:
    """See Network.attention; q ``[rows, T, H, D]`` and caches in one dtype, of which no row has more than ``kv_len`` positions.

    shape: ``wide`` where that is float32.
    """
    (rows, tokens, heads, _), flat = q.shape, q.flatten(2)
    out = torch.empty(rows, tokens, heads, shape.value_width, dtype=q.dtype, device=q.device)
    parts = shape.parts(rows, tokens, kv_len)
    kernel = attention_kernel(shape, q.dtype, tokens, parts > 1)
    # Whole groups of 16 keys, or 32, for each of the block's four warps.
    group = 128 if shape.wide else 64
    part_keys = -(-kv_len // (group * parts)) * group
    strides = (*k.stride()[:3], *v.stride()[:3])
    partial = None
    if parts > 1:
        partial = torch.empty(rows, tokens, heads, parts, shape.value_width + 2, dtype=torch.float32, device=q.device)
    record = Launch(kernel, (shape.tiles(tokens), rows, parts), (token_stride(flat), *strides, part_keys))
    launch(record, (flat, k, v, step), (out, out if partial is None else partial))
    if partial is not None:
        kernel = sum_kernel(q.dtype, shape.value_width)
        launch(Launch(kernel, (rows * tokens * heads, 1, 1), (parts,)), (partial,), (out,))
    return out


def attention_kernel(shape: AttentionShape, dtype: torch.dtype, tokens: int, partial: bool) -> Kernel:
    defines = (
        ("HEADS", shape.heads),
        ("KV_HEADS", shape.kv_heads),
        ("WIDTH", shape.width),
        ("VALUE_WIDTH", shape.value_width),
        ("VALUE_TILE", shape.value_tile),
        ("TOKENS", tokens),
        ("WINDOW", shape.window or 0),
        ("SCALE", f"{float(shape.scale)!r}f"),
        ("PARTIAL", int(partial)),
    )
    if shape.wide:
        return Kernel("wide_attention.cu", "wide_attention", 128, (*defines, ("QUERIES", shape.queries(tokens))))
    return Kernel("decode_attention.cu", "decode_attention", 128, (("ACT", CUDA_TYPES[dtype]), *defines))


def sum_kernel(dtype: torch.dtype, value_width: int) -> Kernel:
    return Kernel("attention_sum.cu", "attention_sum", 128, (("ACT", CUDA_TYPES[dtype]), ("VALUE_WIDTH", value_width)))


def variants() -> list[Kernel]:
    """Nemotron-3 Nano, Qwen3.5-35B and Kimi Linear's latent attention; a sliding window."""
    bf16 = torch.bfloat16
    nano, qwen = AttentionShape(32, 2, 128, 128, 128**-0.5), AttentionShape(16, 2, 256, 256, 256**-0.5)
    latent, sliding = AttentionShape(32, 1, 576, 512, 192**-0.5), AttentionShape(8, 8, 64, 64, 0.125, 128)
    return [
        *(attention_kernel(shape, bf16, t, p) for shape in (nano, qwen, latent) for t in (1, 4) for p in (False, True)),
        attention_kernel(sliding, torch.float16, 1, False),
        *(attention_kernel(replace(s, wide=True), torch.float32, 4, p) for s, p in ((nano, False), (latent, True))),
        sum_kernel(bf16, 128),
        sum_kernel(bf16, 512),
        cache_kernel(2, 16, 16),
        cache_kernel(1, 72, 16),
        rope_kernel(bf16, 16, 256, 64, False),
        rope_kernel(bf16, 32, 64, 64, True),
    ]
