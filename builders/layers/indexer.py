"""Indexers: small scorers that choose, block by block, which positions an attention layer attends to.

A block of ``block`` positions is stood for by one key, which is made when the last of its tokens arrives and cached in the
block's row. Tokens that wait for the end of their block lie in a ring, addressed by position like every other state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from trtllm_replayssm.builders.described import Described
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.network.base import Network, Rope, Tensor
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig

#: Rows of a block cache come in multiples of this, so that slots begin where TensorRT can bind them (SLOT_ALIGNMENT).
ROWS = 16


@dataclass(frozen=True)
class Indexer(Described, ABC):
    """num_heads query heads of head_dim D, and one key for every ``block`` positions, of which ``count`` are chosen.

    Every rank holds the whole indexer, so that all choose alike.
    """

    num_heads: int
    head_dim: int
    block: int
    count: int

    @property
    @abstractmethod
    def ring_channels(self) -> int:
        """Channels of a token that go into its block's key."""

    @abstractmethod
    def parameters(self, hidden_size: int, query_width: int) -> dict[str, Parameter]:
        """Weights by name. query_width: of what the queries are projected from."""

    @abstractmethod
    def selected(self, net: Network, name: str, x: Tensor, query: Tensor, replay: ReplayConfig) -> Tensor | None:
        """What ``Network.attention`` wants to know of the chosen positions; None for all.

        name: prefix of weights and pools. x: input of the attention layer ``[rows, T, hidden]``. query: ``[rows, T,
        query_width]``.
        """

    def ring(self, replay: ReplayConfig) -> CausalConvAttributes:
        """The ring as that of a convolution over a block."""
        return replace(CausalConvAttributes.create(self.ring_channels, self.block, replay), silu=False)

    def pools(self, options: StateOptions, prefix: str) -> dict[str, Pool]:
        """Per-slot state, by name behind ``prefix``."""
        positions, verified = options.max_seq_len + options.replay.max_draft_len, options.replay.verify_tokens
        # Behind the blocks of a request there is room for those that a padding row of a step writes.
        blocks = positions // self.block + -(-verified // self.block)
        rows = -(-blocks // ROWS) * ROWS
        cache = Pool((1, rows, self.head_dim), options.activation, "kv", self.block)
        pools = {"cache": cache} | self.ring(options.replay).pools(options.activation)
        return {prefix + name: pool for name, pool in pools.items()}

    def cached(self, net: Network, name: str, keys: Tensor) -> Tensor:
        """The block cache, with keys ``[rows, T, D]`` of the blocks that end at the step's tokens."""
        return net.block_cache_update(net.pool(f"{name}.cache"), net.unflatten(keys, (1, self.head_dim)), self.block)

    def convolved(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        """x ``[rows, T, ring_channels]`` summed over the block that ends at a token, weighed by ``taps``."""
        return net.causal_conv(
            self.ring(replay), x, net.weight(f"{name}.taps.weight"), None, net.pool(f"{name}.conv_ring")
        )


@dataclass(frozen=True)
class PooledIndexer(Indexer):
    """Blocks by learned pooling, as in GLM-5.3.

    A token's key is ``layer_norm(k @ x)``, its gate ``gate @ x``; a block's key is, channel by channel, the mean of its
    tokens' keys weighed by ``softmax(gate + position)``. A block's score is ``sum_h (w @ x)_h relu(q_h . key)``, scaled by
    ``(num_heads D)^-1/2``.
    """

    kind = "pooled_indexer"

    norm_epsilon: float

    @property
    def ring_channels(self) -> int:
        # Keys and gates of a whole block side by side, see ``delays``.
        return 2 * self.head_dim * self.block

    def parameters(self, hidden_size: int, query_width: int) -> dict[str, Parameter]:
        width = self.head_dim
        return {
            "q.weight": Parameter((self.num_heads * width, query_width)),
            "k.weight": Parameter((width, hidden_size)),
            "gate.weight": Parameter((width, hidden_size)),
            "norm.weight": Parameter((width,)),
            "norm.bias": Parameter((width,), nonzero=False),
            "position.weight": Parameter((width * self.block,), nonzero=False),
            "head.weight": Parameter((self.num_heads, hidden_size)),
            "taps.weight": Parameter((self.ring_channels, self.block)),
        }

    def delays(self) -> Tensor:
        """Taps that pick, in channel ``c * block + i``, the i-th of the last ``block`` tokens: no sum, only a delay."""
        return torch.eye(self.block).repeat(2 * self.head_dim, 1)

    def selected(self, net: Network, name: str, x: Tensor, query: Tensor, replay: ReplayConfig) -> Tensor | None:
        q = net.unflatten(net.linear(query, net.weight(f"{name}.q.weight")), (self.num_heads, self.head_dim))
        key = self.normed(net, name, net.linear(x, net.weight(f"{name}.k.weight")))
        gate = net.linear(x, net.weight(f"{name}.gate.weight"))
        keys = self.cached(net, name, self.pooled(net, name, key, gate, replay))
        weights = net.cast(net.linear(x, net.weight(f"{name}.head.weight")), "float32")
        weights = net.scale(weights, (self.num_heads * self.head_dim) ** -0.5)
        return net.select_blocks(q, keys, weights, self.block, self.count)

    def normed(self, net: Network, name: str, x: Tensor) -> Tensor:
        """Layer norm: RMSNorm of what is left without the mean."""
        centred = net.add(x, net.scale(net.sum(x), -1 / self.head_dim))
        normed = net.rms_norm(centred, net.weight(f"{name}.norm.weight"), self.norm_epsilon)
        return net.add_bias(normed, net.weight(f"{name}.norm.bias"))

    def pooled(self, net: Network, name: str, key: Tensor, gate: Tensor, replay: ReplayConfig) -> Tensor:
        """The key of the block that ends at a token ``[rows, T, D]``; of use only where one does."""
        width, block = self.head_dim, self.block
        both = net.unflatten(net.concat((key, gate)), (2 * width, 1))
        recent = self.convolved(net, name, net.flatten(net.concat((both,) * block)), replay)
        keys, gates = net.split(recent, (width * block,) * 2)
        gates = net.add_bias(net.cast(gates, "float32"), net.weight(f"{name}.position.weight"))
        keys = net.unflatten(keys, (width, block))
        weights = net.cast_like(net.softmax(net.unflatten(gates, (width, block))), keys)
        return net.flatten(net.sum(net.multiply(weights, keys)))


@dataclass(frozen=True)
class MeanIndexer(Indexer):
    """Blocks by their mean, as in Qwen3.8-Flash-Next.

    q and k are rows of one projection. A block's key is the RMSNorm (zero-centred weights, as that of q) of the mean of its
    tokens' k, rotated to the block's first position. Its score is ``sum_h relu(q_h . key)``.
    """

    kind = "mean_indexer"

    norm_epsilon: float
    rope: Rope

    @property
    def ring_channels(self) -> int:
        return self.head_dim

    def parameters(self, hidden_size: int, query_width: int) -> dict[str, Parameter]:
        norm = Parameter((self.head_dim,), nonzero=False)
        return {
            "qk.weight": Parameter(((self.num_heads + 1) * self.head_dim, query_width)),
            "q_norm.weight": norm,
            "k_norm.weight": norm,
            "taps.weight": Parameter((self.head_dim, self.block)),
        }

    def mean(self) -> Tensor:
        """Taps of the mean."""
        return torch.full((self.head_dim, self.block), 1 / self.block)

    def selected(self, net: Network, name: str, x: Tensor, query: Tensor, replay: ReplayConfig) -> Tensor | None:
        width, heads = self.head_dim, self.num_heads
        q, k = net.split(net.linear(query, net.weight(f"{name}.qk.weight")), (heads * width, width))
        q = net.rms_norm(net.unflatten(q, (heads, width)), net.weight(f"{name}.q_norm.weight"), self.norm_epsilon, True)
        k = net.rms_norm(
            self.convolved(net, name, k, replay), net.weight(f"{name}.k_norm.weight"), self.norm_epsilon, True
        )
        # The block that ends at a token begins block - 1 positions before it.
        first = replace(self.rope, shift=1 - self.block)
        k = net.flatten(net.rope(net.unflatten(k, (1, width)), first))
        return net.select_blocks(net.rope(q, self.rope), self.cached(net, name, k), None, self.block, self.count)
