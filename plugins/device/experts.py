"""Mixture of experts of the embedded engine on the GPU: routing, pairs sorted by expert, grouped products, weighted sum.

Nothing here depends on a value that only the device knows: shapes and grids follow from the number of tokens alone, so that
a step needs no word from the device and can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch

#: Most experts that ``route`` gives a token, and most experts of a layer.
MOST_CHOICES, MOST_EXPERTS = 32, 1024
#: ACTIVATION of grouped_linear.cu.
ACTIVATIONS = ("none", "relu2", "swiglu", "clamped_swiglu", "situ")
#: Of them, those whose first matrix has gate rows and up rows.
GATED = ACTIVATIONS[2:]
#: Blocks that divide the pairs of an expert among them, at most.
MOST_SHARES = 4
#: Contracted elements of a tile of grouped_linear.cu.
DEPTH_TILE = 64
INFINITE = "__int_as_float(0x7f800000)"
#: Bounds of gates and of their factors, None for none.
Limits = tuple[float | None, float | None]
NO_LIMITS: Limits = (None, None)


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: Literal["sigmoid", "softmax"],
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Indices int32 and weights float32 ``[tokens, top_k]`` from float32 logits ``[tokens, experts]``; see Network.route."""
    tokens, experts = logits.shape
    indices = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    kernel = route_kernel(experts, top_k, router, n_group, topk_group, bias is not None, normalise, scale)
    launch(Launch(kernel, (-(-tokens // 4), 1, 1), (tokens,)), (logits, bias), (indices, weights))
    return indices, weights


def route_kernel(
    experts: int,
    top_k: int,
    router: str,
    n_group: int,
    topk_group: int,
    bias: bool,
    normalise: bool,
    scale: float,
) -> Kernel:
    defines = (
        ("EXPERTS", experts),
        ("TOP_K", top_k),
        ("N_GROUP", n_group),
        ("TOPK_GROUP", topk_group),
        ("SOFTMAX", int(router == "softmax")),
        ("BIAS", int(bias)),
        ("NORMALISE", int(normalise)),
        ("SCALE", f"{float(scale)!r}f"),
    )
    return Kernel("route.cu", "route", 128, defines)


@dataclass(frozen=True)
class Tile:
    """warps: 16 * tall rows of a matrix each. columns: pairs of one expert at a time. stages: tiles in shared memory."""

    warps: int
    columns: int
    stages: int = 4
    tall: int = 1

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return 16 * self.tall * self.warps

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.stages * (self.rows + self.columns) * DEPTH_TILE * 2


#: Blocks by the pairs that they take at a time. Few pairs leave the memory to be kept busy, by many blocks; with more, warps
#: of 32 rows read each pair half as often from shared memory.
TILES = (Tile(4, 16), Tile(4, 32), Tile(4, 64, 3, 2), Tile(8, 96), Tile(8, 128, 3, 2))


def tile_for(pairs: int, experts: int) -> Tile:
    """The block's shape by the pairs that an expert can expect, from ``benchmarks/expert_tiles.py``.

    An expert with more pairs than columns has its matrix read twice, so most are allowed for: two standard deviations.
    """
    mean = pairs / experts
    likely = mean + 2 * math.sqrt(mean)
    return next((tile for tile in TILES if likely <= tile.columns), TILES[-1])


def experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    limits: Limits = NO_LIMITS,
    tile: Tile | None = None,
) -> Tensor:
    """See Network.experts, for 16-bit x ``[tokens, D]``, indices int32 and weights float32 ``[tokens, k]``.

    limits: of gates and of their factors.
    """
    (tokens, width), top_k, count = x.shape, indices.shape[1], up.shape[0]
    pairs, inner, x = tokens * top_k, down.shape[2], x.contiguous()
    order, ends, active = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (pairs, count, count))
    launch(Launch(order_kernel(count), (1, 1, 1), (pairs,)), (indices,), (order, ends, active))
    hidden, products = (torch.empty(pairs, n, dtype=x.dtype, device=x.device) for n in (inner, width))
    shape = tile or tile_for(pairs, count)
    most = min(pairs, count)
    sorted_pairs = (order, ends, active)
    # No expert has more pairs than there are tokens.
    shares = max(1, min(MOST_SHARES, -(-tokens // shape.columns)))
    kernel = linear_kernel(x.dtype, inner, width, shape, activation, limits, top_k, True, shares)
    launch(Launch(kernel, (blocks(kernel), most, 1)), (x, up, *sorted_pairs), (hidden,))
    kernel = linear_kernel(x.dtype, width, inner, shape, "none", NO_LIMITS, top_k, False, shares)
    launch(Launch(kernel, (blocks(kernel), most, 1)), (hidden, down, *sorted_pairs), (products,))
    return weighted_sum(products, weights)


def weighted_sum(products: Tensor, weights: Tensor) -> Tensor:
    """``sum_j weights[:, j] * products[:, j]`` for products ``[tokens * k, D]`` and float32 weights ``[tokens, k]``."""
    (tokens, top_k), width = weights.shape, products.shape[1]
    out = torch.empty(tokens, width, dtype=products.dtype, device=products.device)
    kernel = sum_kernel(products.dtype, width, top_k)
    grid = (tokens, -(-width // (128 * int(dict(kernel.defines)["VECTOR"]))), 1)
    launch(Launch(kernel, grid), (products, weights), (out,))
    return out


def order_kernel(count: int) -> Kernel:
    return Kernel("expert_order.cu", "expert_order", 1024, (("EXPERTS", count),))


def sum_kernel(dtype: torch.dtype, width: int, top_k: int) -> Kernel:
    defines = (("ACT", CUDA_TYPES[dtype]), ("WIDTH", width), ("TOP_K", top_k), ("VECTOR", 8 if width % 8 == 0 else 1))
    return Kernel("expert_sum.cu", "expert_sum", 128, defines)


def linear_kernel(
    dtype: torch.dtype,
    outer: int,
    depth: int,
    tile: Tile,
    activation: str,
    limits: Limits,
    top_k: int,
    gather: bool,
    shares: int = MOST_SHARES,
) -> Kernel:
    """gather: the product that reads tokens; otherwise the one that writes a row for each pair. shares: see the source."""
    gate_limit, limit = (INFINITE if bound is None else f"{float(bound)!r}f" for bound in limits)
    defines = (
        ("ACT", CUDA_TYPES[dtype]),
        ("OUTER", outer),
        ("DEPTH", depth),
        ("WARPS", tile.warps),
        ("TALL", tile.tall),
        ("COLUMNS", tile.columns),
        ("STAGES", tile.stages),
        ("SHARES", shares),
        ("ACTIVATION", ACTIVATIONS.index(activation)),
        ("GATE_LIMIT", gate_limit),
        ("LIMIT", limit),
        ("TOP_K", top_k),
        ("GATHER", int(gather)),
        ("SCATTER", int(not gather)),
    )
    requested = (tile.stages - 1) * tile.rows * DEPTH_TILE * 2
    return Kernel("grouped_linear.cu", "grouped_linear", 32 * tile.warps, defines, requested, tile.shared)


def blocks(kernel: Kernel) -> int:
    """Blocks of one expert."""
    macros = dict(kernel.defines)
    rows = (
        16 * int(macros["WARPS"]) * int(macros["TALL"]) // (2 if ACTIVATIONS[int(macros["ACTIVATION"])] in GATED else 1)
    )
    return -(-int(macros["OUTER"]) // rows) * int(macros["SHARES"])


def suited(x: Tensor, up: Tensor, down: Tensor, top_k: int) -> bool:
    """Whether the kernels take these experts: 16-bit elements, rows of whole 16-byte pieces, and not too many."""
    same = x.dtype == up.dtype == down.dtype and x.itemsize == 2
    return same and up.shape[2] % 8 == down.shape[2] % 8 == 0 and up.shape[0] <= MOST_EXPERTS and top_k <= MOST_CHOICES


def variants() -> list[Kernel]:
    """Nemotron-3 Nano and Qwen3.5-35B at every tile, Ling's groups, Super's many choices, GLM-5.3's clamps, and Kimi-K3."""
    bf16, tiles = torch.bfloat16, TILES
    return [
        route_kernel(128, 6, "sigmoid", 1, 1, True, True, 2.5),
        route_kernel(256, 8, "softmax", 1, 1, False, True, 1.0),
        route_kernel(512, 8, "sigmoid", 8, 4, True, True, 2.5),
        route_kernel(512, 22, "sigmoid", 1, 1, True, True, 5.0),
        route_kernel(896, 16, "sigmoid", 1, 1, True, True, 1.0),
        order_kernel(128),
        order_kernel(896),
        sum_kernel(bf16, 2688, 6),
        sum_kernel(torch.float16, 2048, 8),
        *(linear_kernel(bf16, 1856, 2688, tile, "relu2", NO_LIMITS, 6, True) for tile in tiles),
        *(linear_kernel(bf16, 2688, 1856, tile, "none", NO_LIMITS, 6, False) for tile in tiles),
        *(linear_kernel(bf16, 512, 2048, tile, "swiglu", NO_LIMITS, 8, True) for tile in tiles),
        linear_kernel(torch.float16, 768, 2560, tiles[1], "swiglu", (7.0, 7.0), 8, True),
        linear_kernel(bf16, 2048, 4096, tiles[0], "clamped_swiglu", (10.0, 10.0), 8, True),
        *(linear_kernel(bf16, 3072, 3584, tile, "situ", (4.0, 25.0), 16, True) for tile in tiles),
    ]
