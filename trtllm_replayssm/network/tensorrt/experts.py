"""``Network.experts``: the native mixture-of-experts layer where it fits, else grouped products over routed experts only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_replayssm.compat import MOE_CAPABILITIES
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor

#: Rows of a block in the grouped form: one expert's weights are fetched once for up to so many tokens.
BLOCK = 128


def native_fits(e: Emitter, capability: tuple[int, int] | None, activation: str, limit: float | None) -> bool:
    """The native layer knows SwiGLU only, its limit clamps before the SiLU, and it runs on few devices."""
    suits = activation == "swiglu" and limit is None
    return suits and e.tensorrt.features.moe and capability is not None and capability[0] in MOE_CAPABILITIES


def native_experts(e: Emitter, x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x ``[rows, T, D]``, up ``[E, 2F, D]`` (gate rows first), down ``[E, D, F]``."""
    inner, turned = up.shape[1] // 2, (0, 2, 1)
    gate_weights, up_weights = (e.transpose(e.slice(up, 1, i * inner, inner), turned) for i in (0, 1))
    layer = e.network.add_moe(x, indices, e.cast(weights, e.dtype(x)))
    e.named(layer, "experts", x, indices, weights)
    layer.set_gated_weights(gate_weights, up_weights, e.transpose(down, turned), e.trt.MoEActType.SILU)
    return layer.get_output(0)


def grouped_experts(
    e: Emitter,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    hidden_of: Callable[[Tensor], Tensor],
) -> Tensor:
    """The same from ordinary layers, for any activation; ``hidden_of`` turns ``[..., up rows]`` into ``[..., F]``.

    The (token, expert) pairs are sorted by expert into blocks of BLOCK rows, each block with one expert, and every block
    is a pair of matrix products with that expert's weights. ``P`` pairs of ``E`` experts need at most
    ``P // BLOCK + min(P, E)`` blocks, which is the number made; surplus blocks compute what nobody reads. No expert is
    touched that no token chose, except that surplus blocks fetch the last one. TensorRT copies each block's weights before
    it multiplies: about three times the memory traffic of a fused kernel.
    """
    experts, width, top_k = up.shape[0], x.shape[-1], indices.shape[-1]
    number = lambda value, rank=1: e.number(value, torch.int32, rank)  # noqa: E731
    flat = e.reshape(x, (-1, width))
    expert = e.reshape(indices, (-1, 1))
    pairs = e.size(expert, 0)

    chosen = e.cast(e.binary("EQUAL", expert, e.arange(experts, 2)), torch.int32)
    place = e.binary("SUB", e.gather_elements(e.running_sum(chosen, 0), expert, 1), number(1, 2))
    filled = e.binary("SUM", e.reduce("SUM", chosen, 0), number(BLOCK - 1, 2))
    blocks = e.binary("FLOOR_DIV", filled, number(BLOCK, 2))
    end = e.running_sum(blocks, 1)
    first = e.reshape(e.binary("SUB", end, blocks), (-1,))
    slot = e.binary(
        "SUM", e.binary("PROD", e.gather(first, e.reshape(expert, (-1,)), 0), number(BLOCK)), e.reshape(place, (-1,))
    )

    wide = lambda value: e.number(value, torch.int64, 1)  # noqa: E731
    count = e.binary("SUM", e.binary("FLOOR_DIV", pairs, wide(BLOCK)), e.binary("MIN", pairs, wide(experts)))
    token = e.binary("FLOOR_DIV", e.dynamic_arange(pairs), number(top_k))
    nobody = e.dynamic_arange(e.binary("PROD", count, wide(BLOCK)), delta=0)
    token_of_slot = e.reshape(e.scatter_elements(nobody, slot, token), (-1, BLOCK))
    passed = e.unary("NOT", e.binary("GREATER", end, e.reshape(e.dynamic_arange(count), (-1, 1))))
    owner = e.reshape(e.reduce("SUM", e.cast(passed, torch.int32), 1), (-1,))
    owner = e.binary("MIN", owner, number(experts - 1))

    inputs = e.gather(e.cast(flat, e.dtype(up)), token_of_slot, 0)
    hidden = hidden_of(e.matmul(inputs, e.gather(up, owner, 0), transpose_b=True))
    outputs = e.reshape(e.matmul(hidden, e.gather(down, owner, 0), transpose_b=True), (-1, width))

    each = e.gather(outputs, e.reshape(slot, (-1, top_k)), 0)
    share = e.reshape(e.cast(weights, torch.float32), (-1, top_k, 1))
    total = e.reduce("SUM", e.binary("PROD", e.cast(each, torch.float32), share), 1)
    total = e.cast(e.reshape(total, (-1, width)), e.dtype(x))
    return e.reshape_like(total, e.shape(x), tuple(x.shape))
