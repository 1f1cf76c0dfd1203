"""``Network.experts``: the native mixture-of-experts layer where it fits, else grouped products over routed experts only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_replayssm.compat import MOE_CAPABILITIES
from trtllm_replayssm.network.gated import Limit
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor

#: Rows of a block in the grouped form: one expert's weights are fetched once for up to so many tokens.
BLOCK = 128


#: Dtypes that fused kernels of experts are made for.
NATIVE_DTYPES = (torch.bfloat16, torch.float16)


def native_fits(
    e: Emitter, capability: tuple[int, int] | None, dtypes: set[torch.dtype], activation: str, limit: Limit
) -> bool:
    """The native layer knows SwiGLU only, does not say what exactly its limit clamps, and runs on few devices.

    dtypes: of tokens and weights. TensorRT does not state which it takes; one of 16 bits is asked of it, and no mixture.
    """
    suits = activation == "swiglu" and limit is None and any(dtypes == {dtype} for dtype in NATIVE_DTYPES)
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
    flat, expert = e.reshape(x, (-1, width)), e.reshape(indices, (-1, 1))
    slot, owner, count = blocks_of(e, expert, experts)

    # Which token stands in each slot; slots that nobody took hold token 0.
    token = e.binary("FLOOR_DIV", e.dynamic_arange(e.size(expert, 0)), e.number(top_k, torch.int32, 1))
    nobody = e.dynamic_arange(e.binary("PROD", count, e.number(BLOCK, torch.int64, 1)), delta=0)
    token_of_slot = e.reshape(e.scatter_elements(nobody, slot, token), (-1, BLOCK))

    inputs = e.gather(e.cast(flat, e.dtype(up)), token_of_slot, 0)
    hidden = hidden_of(e.matmul(inputs, e.gather(up, owner, 0), transpose_b=True))
    outputs = e.reshape(e.matmul(hidden, e.gather(down, owner, 0), transpose_b=True), (-1, width))

    each = e.gather(outputs, e.reshape(slot, (-1, top_k)), 0)
    share = e.reshape(e.cast(weights, torch.float32), (-1, top_k, 1))
    total = e.reduce("SUM", e.binary("PROD", e.cast(each, torch.float32), share), 1)
    total = e.cast(e.reshape(total, (-1, width)), e.dtype(x))
    return e.reshape_like(total, e.shape(x), tuple(x.shape))


def blocks_of(e: Emitter, expert: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the pairs go. expert: int32 ``[pairs, 1]``.

    Returns the slot of each pair ``[pairs]`` (its block times BLOCK plus its row), the expert of each block ``[blocks]``,
    and the number of blocks, int64 ``[1]``.
    """
    pairs, one, block = e.size(expert, 0), e.number(1, torch.int32, 2), e.number(BLOCK, torch.int32, 2)
    chosen = e.cast(e.binary("EQUAL", expert, e.arange(experts, 2)), torch.int32)
    row = e.binary("SUB", e.gather_elements(e.running_sum(chosen, 0), expert, 1), one)
    filled = e.binary("SUM", e.reduce("SUM", chosen, 0), e.number(BLOCK - 1, torch.int32, 2))
    blocks = e.binary("FLOOR_DIV", filled, block)
    end = e.running_sum(blocks, 1)
    first = e.gather(e.reshape(e.binary("SUB", end, blocks), (-1,)), expert, 0)
    slot = e.reshape(e.binary("SUM", e.binary("PROD", first, block), row), (-1,))

    whole = e.binary("FLOOR_DIV", pairs, e.number(BLOCK, torch.int64, 1))
    count = e.binary("SUM", whole, e.binary("MIN", pairs, e.number(experts, torch.int64, 1)))
    # A block belongs to the first expert whose blocks do not end before it.
    passed = e.unary("NOT", e.binary("GREATER", end, e.reshape(e.dynamic_arange(count), (-1, 1))))
    owner = e.reshape(e.reduce("SUM", e.cast(passed, torch.int32), 1), (-1,))
    return slot, e.binary("MIN", owner, e.number(experts - 1, torch.int32, 1)), count
