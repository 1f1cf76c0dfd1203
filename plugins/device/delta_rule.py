"""Kernel variants and launches that ``gated_delta`` and ``kda`` share.

A block works on one value head of one batch row, on two where there are more than enough of them, or on a slice of one's
value rows where the batch is too small to fill the GPU with whole heads. Variants differ in the number of tokens they
answer from checkpoint and ring (``TOKENS``); longer steps run through the recurrence, and so do rows that fold where the shape
has no fold of its own.
Rows of many tokens have kernels of their own where ``delta_prefill`` takes the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.delta_prefill import prefill_record, takes_prefill
from trtllm_replayssm.plugins.device.standard import delta_standard, is_standard, warp_rows
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, Macros, slot_stride, token_stride
from trtllm_replayssm.plugins.read_copy import FORMATS, copy_names
from trtllm_replayssm.replay import ReadDtype

#: Token counts that a read-out variant is compiled for; a step takes the next larger one.
READ_TOKENS = (1, 2, 4, 8, 16)
#: Value rows that four warps of eight-lane rows fill; a slice is a multiple of it.
SLICE_ROWS = 16
#: Blocks that fill the GPU: four on each of its multiprocessors, which number 132 (H100, H200) to 160 (B300).
FULL_GRID = 512
#: Blocks of a prefill that do: one on each.
PREFILL_GRID = 128
#: Entries that the kernels take at once (delta_chunk_inputs.cuh).
CHUNK = 16
#: Value rows that a block's warps hold at a time, 16 each.
TILE_ROWS = 64
#: Longest step whose inputs leave shared memory for two heads of a block.
MOST_TOKENS_OF_TWO_HEADS = 4
#: By tokens: blocks of a step with a read copy that a multiprocessor's registers hold without spilling; one more where
#: a fold takes a single chunk, and of four bfloat16 tokens with a short window.
COPY_BLOCKS_AN_SM = {1: 4, 2: 4, 4: 4, 8: 3, 16: 2}
#: Blocks of a step without one that answers from the checkpoint as it is, or as its fold leaves it; one fewer for 16
#: tokens, and with decays per channel, with and without a copy.
ANSWERED_BLOCKS_AN_SM = 5
POOLS = ("state", "ring_k", "ring_v", "ring_g", "ring_beta")


@dataclass(frozen=True)
class DeltaShape:
    """What both layers' attributes say about shapes, and the macros that only one of them has."""

    source: str
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    window: int
    ring_rows: int
    derived_fold: bool
    per_channel: bool
    read_dtype: ReadDtype
    macros: tuple[tuple[str, str], ...]

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the layer's pools, in the order of a launch's parameters."""
        return POOLS + copy_names(self.read_dtype)


def launch_record(
    shape: DeltaShape,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
    aligned: bool = True,
) -> Launch:
    """strides: token strides of qkv, decay and beta logits, then slot strides of the shape's pools, in elements.

    aligned: every tensor starts on 16 bytes, as tensors of TensorRT and fresh torch tensors do.
    """
    in_vectors = (*strides[: 1 + shape.per_channel], shape.key_dim, shape.value_dim)
    vectors = aligned and all(n * activation.itemsize % 16 == 0 for n in in_vectors)
    plain = is_standard(shape.window, shape.ring_rows, tokens) and shape.read_dtype == "same"
    if plain and vectors and warp_rows((shape.value_dim, shape.key_dim), state):
        return delta_standard(shape, activation, state, rows, (tokens, *strides))
    if tokens > READ_TOKENS[-1] and vectors and takes_prefill(shape, activation, ring):
        macros = (*sizes(shape, activation, state, ring), *shape.macros)
        return prefill_record(shape, activation, macros, rows, (tokens, *strides))
    split = slices(shape, rows, tokens) if vectors else 1
    heads = heads_a_block(shape, rows, tokens) if vectors else 1
    kernel = variant(shape, activation, state, ring, tokens, split, vectors, heads)
    return Launch(kernel, (shape.value_heads // heads * split, rows, 1), (tokens, *strides))


def slices(shape: DeltaShape, rows: int, tokens: int) -> int:
    """Slices of a head's value rows, so that even a small batch fills the GPU.

    A prefill's blocks are busy for long, one on each multiprocessor is enough, and its tile of the state should be all of
    the slice. An nvfp4 copy has a scale of the whole head, which its only block knows.
    """
    if shape.read_dtype == "nvfp4":
        return 1
    prefill = tokens > READ_TOKENS[-1]
    enough, split = PREFILL_GRID if prefill else FULL_GRID, 1
    while (
        (rows * shape.value_heads * split < enough or (prefill and shape.value_dim // split > TILE_ROWS))
        and shape.value_dim % (2 * split) == 0
        and shape.value_dim // (2 * split) % SLICE_ROWS == 0
    ):
        split *= 2
    return split


def heads_a_block(shape: DeltaShape, rows: int, tokens: int) -> int:
    """Value heads of a block: two that share a key head, if every multiprocessor has several such blocks."""
    shared = shape.value_heads // shape.key_heads % 2 == 0
    small = (
        tokens <= MOST_TOKENS_OF_TWO_HEADS and shape.window <= CHUNK and shape.key_dim <= 128 and shape.value_dim <= 128
    )
    return 2 if shared and small and shape.window > 1 and rows * shape.value_heads >= 2 * FULL_GRID else 1


def variant(
    shape: DeltaShape,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    tokens: int,
    split: int,
    aligned: bool,
    heads: int = 1,
) -> Kernel:
    read_tokens = next((n for n in READ_TOKENS if tokens <= n), 0)
    apart = aligned and activation == ring and folds_apart(shape, state, ring, read_tokens, split)
    fewer = read_tokens == READ_TOKENS[-1] or shape.per_channel
    blocks = ANSWERED_BLOCKS_AN_SM - fewer if apart else blocks_an_sm(shape, activation, state, read_tokens)
    defines: Macros = (
        *sizes(shape, activation, state, ring),
        ("TOKENS", read_tokens),
        ("HEADS_A_BLOCK", heads),
        ("SPLIT", split),
        ("ALIGNED", int(aligned)),
        ("BLOCKS_AN_SM", blocks),
        *shape.macros,
    )
    return Kernel(f"{shape.source}.cu", shape.source, 128, defines)


def sizes(shape: DeltaShape, activation: torch.dtype, state: torch.dtype, ring: torch.dtype) -> Macros:
    """Macros of element types and of what a launch does not choose."""
    return (
        ("ACT", CUDA_TYPES[activation]),
        ("STATE", CUDA_TYPES[state]),
        ("RING", CUDA_TYPES[ring]),
        ("KEY_HEADS", shape.key_heads),
        ("VALUE_HEADS", shape.value_heads),
        ("KEY_DIM", shape.key_dim),
        ("VALUE_DIM", shape.value_dim),
        ("WINDOW", shape.window),
        ("RING_ROWS", shape.ring_rows),
        ("DERIVED", int(shape.derived_fold)),
        ("READ_BITS", FORMATS[shape.read_dtype].bits if shape.read_dtype != "same" else 0),
    )


def folds_apart(shape: DeltaShape, state: torch.dtype, ring: torch.dtype, read_tokens: int, split: int) -> bool:
    """ANSWERS_FIRST or KDA_VERIFIES of delta_read_shape.cuh, of inputs of one type in whole vectors."""
    value_rows, rest = divmod(shape.value_dim, split)
    history = shape.window if shape.ring_rows > shape.window else max(shape.window - 1, 1)
    narrow = ring.itemsize == 2 and not shape.derived_fold
    fits = value_rows <= 128 and value_rows % SLICE_ROWS == 0 and rest == 0
    if shape.per_channel:
        suited = shape.key_dim == 128 and history <= CHUNK
    else:
        few = history + read_tokens <= 2 * CHUNK and (state == torch.float32 or history <= CHUNK)
        suited = shape.read_dtype == "same" and shape.key_dim in (64, 128) and few
    return narrow and fits and suited and read_tokens > 1


def blocks_an_sm(shape: DeltaShape, activation: torch.dtype, state: torch.dtype, read_tokens: int) -> int:
    """Blocks that must fit on a multiprocessor, which bounds a thread's registers.

    A decode step wants many, because a block waits for its inputs before it multiplies, but no more than leave it the
    registers it needs; a prefill fills no GPU with blocks and wants registers. A step of one token whose ring fits into a
    chunk holds half of the state at a time. Keys that are floats take more registers. With a read copy, a fold has the state
    in shared memory, unless 16 bits would have to wait there for another chunk.
    """
    if not read_tokens or shape.key_dim > 128:
        return 2
    if shape.read_dtype != "same" and not shape.per_channel and activation.itemsize == 2:
        one_chunk = read_tokens == 1 and shape.ring_rows <= CHUNK
        most = COPY_BLOCKS_AN_SM[read_tokens] if one_chunk or state == torch.float32 else 2
        small = shape.window <= CHUNK and shape.value_dim <= 128
        four = read_tokens == 4 and small and (activation, state) == (torch.bfloat16, torch.float32)
        return most + 1 if one_chunk or four else most
    if read_tokens == 1 and shape.ring_rows <= CHUNK:
        return 4
    copied = shape.read_dtype != "same" and (state.itemsize == 2 or read_tokens == READ_TOKENS[-1])
    wide = read_tokens == READ_TOKENS[-1] and shape.value_dim > 128
    return 2 if activation == torch.float32 or shape.per_channel or copied or wide else 3


def pool_tensors(shape: DeltaShape, pools: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(pools[name] for name in shape.pools)


def strides_of(qkv: Tensor, decay: Tensor, b: Tensor, bound: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (*map(token_stride, (qkv, decay, b)), *map(slot_stride, bound))
