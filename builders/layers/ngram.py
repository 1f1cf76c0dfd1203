"""Hashed n-gram embeddings, which lie outside of the branches' norms and add to all residual streams."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trtllm_replayssm.builders.layers.base import StateOptions, StreamLayer
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.network.ngram import NgramHash
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.pools import SLOT_ALIGNMENT, Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class NgramEmbedding(StreamLayer):
    """Rows of hash tables for the n-grams that end at a token, let in by every stream as far as it agrees with them.

    The rows side by side are e; key, value and query are ``norm(key @ e)``, ``value @ e`` and ``norm(stream)``, each norm an
    RMSNorm of one stream with zero-centred weights. With ``s = key . query / sqrt(D)``, which becomes ``sign(s) sqrt|s|``,
    a stream is given ``u = sigmoid(s) value`` and ``silu(conv(norm(u)))``, a depthwise convolution over tokens that are
    ``ngram_size`` apart.

    streams: how many there are; channels: of all of them. ngram_size, heads, table_rows, vocab_size, seed, index, end_token:
    see NgramHash. rows: of all tables together with their padding, stored in ``shards`` equal parts. width: channels of a row
    on this rank, ``full_width`` on all. conv_kernel: taps.
    """

    kind = "ngram"

    streams: int
    channels: int
    ngram_size: int
    heads: int
    table_rows: int
    vocab_size: int
    seed: int
    index: int
    end_token: int
    rows: int
    shards: int
    width: int
    full_width: int
    conv_kernel: int
    norm_epsilon: float

    @cached_property
    def hash(self) -> NgramHash:
        return NgramHash(
            self.ngram_size, self.heads, self.table_rows, self.vocab_size, self.seed, self.index, self.end_token
        )

    @property
    def span(self) -> int:
        """Consecutive tokens that the convolution spans. Its taps are stored with zeros for those in between."""
        return (self.conv_kernel - 1) * self.ngram_size + 1

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        channels, embedded = self.channels, (self.ngram_size - 1) * self.heads * self.full_width
        norm = Parameter((channels,), nonzero=False)
        table = (self.shards, self.rows // self.shards, self.width)
        return {
            "table.weight": Parameter(table, 2, (Segment(self.width, self.width),)),
            "key.weight": Parameter((channels, embedded)),
            "value.weight": Parameter((hidden_size, embedded)),
            "key_norm.weight": norm,
            "query_norm.weight": norm,
            "conv_norm.weight": norm,
            "conv1d.weight": Parameter((channels, self.span)),
        }

    def divided(self, tp_size: int) -> NgramEmbedding:
        return replace(self, width=divide("channels of an n-gram table", self.full_width, tp_size))

    def conv(self, replay: ReplayConfig) -> CausalConvAttributes:
        return CausalConvAttributes.create(self.channels, self.span, replay)

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        whole = SLOT_ALIGNMENT // torch.int32.itemsize
        rows = -(-(options.max_seq_len + options.replay.max_draft_len) // whole) * whole
        conv = self.conv(options.replay).pools(options.activation)
        return {"token_cache": Pool((1, rows, 1), torch.int32, "kv")} | conv

    def added(self, net: Network, name: str, streams: Tensor, token_ids: Tensor, replay: ReplayConfig) -> Tensor:
        ids = net.ngram_ids(self.hash, token_ids, net.pool(f"{name}.token_cache"))
        rows = net.all_gather(net.embedding(ids, net.weight(f"{name}.table.weight")))
        embedded = net.flatten(rows)
        key = self.normed(net, f"{name}.key_norm", net.linear(embedded, net.weight(f"{name}.key.weight")))
        value = net.linear(embedded, net.weight(f"{name}.value.weight"))
        query = self.normed(net, f"{name}.query_norm", streams)
        agreement = net.sum(net.unflatten(net.multiply(key, query), (self.streams, -1)))
        agreement = net.scale(agreement, 1 / math.sqrt(net.shape(value)[-1]))
        gate = net.activation(net.activation(agreement, "signed_root"), "sigmoid")
        let_in = net.flatten(net.multiply(gate, net.unflatten(value, (1, -1))))
        taps, ring = net.weight(f"{name}.conv1d.weight"), net.pool(f"{name}.conv_ring")
        local = net.causal_conv(self.conv(replay), self.normed(net, f"{name}.conv_norm", let_in), taps, None, ring)
        return net.add(let_in, local)

    def normed(self, net: Network, norm: str, x: Tensor) -> Tensor:
        return net.rms_norm(x, net.weight(f"{norm}.weight"), self.norm_epsilon, True, groups=self.streams)
