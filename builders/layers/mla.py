"""Multi-head latent attention in its absorbed form: one latent per token is cached, heads meet it in latent space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.builders.layers.indexer import Indexer
from trtllm_replayssm.builders.parallel import Parameter, Segment, column, divide, row
from trtllm_replayssm.network.base import Network, Rope, Tensor
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Mla(Layer):
    """num_heads heads; queries of nope_dim + rope_dim channels, values of value_dim; latent of kv_rank channels.

    rope_dim may be 0. indexer: chooses the positions that are attended to, from the low-rank query; None for all.
    q_rank: width of the low-rank query, None for a full-rank one. rope: rotation of the rope_dim channels, None where they
    stay as they are. gate: sigmoid gate on the output, one value per head or per channel, from the input.
    kv_b is stored as ``k_up [H, kv_rank, nope_dim]`` and ``v_up [H, value_dim, kv_rank]``.
    """

    kind = "mla"

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_epsilon: float
    q_rank: int | None = None
    q_epsilon: float | None = None
    rope: Rope | None = None
    gate: Literal["head", "element"] | None = None
    indexer: Indexer | None = None

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        heads = self.num_heads
        query, values = heads * (self.nope_dim + self.rope_dim), heads * self.value_dim
        by_head = (Segment(heads, heads),)
        parameters = {
            "kv_a.weight": Parameter((self.kv_rank + self.rope_dim, hidden_size)),
            "kv_a_norm.weight": Parameter((self.kv_rank,)),
            "k_up.weight": Parameter((heads, self.kv_rank, self.nope_dim), 0, by_head),
            "v_up.weight": Parameter((heads, self.value_dim, self.kv_rank), 0, by_head),
            "dense.weight": row(hidden_size, values, heads),
        }
        if self.q_rank is None:
            parameters["q.weight"] = column(query, hidden_size, heads)
        else:
            parameters["q_a.weight"] = Parameter((self.q_rank, hidden_size))
            parameters["q_a_norm.weight"] = Parameter((self.q_rank,))
            parameters["q_b.weight"] = column(query, self.q_rank, heads)
        if self.indexer is not None and self.q_rank is not None:
            parameters |= {f"indexer.{n}": p for n, p in self.indexer.parameters(hidden_size, self.q_rank).items()}
        if self.gate is not None:
            parameters["gate.weight"] = column(heads if self.gate == "head" else values, hidden_size, heads)
        return parameters

    def divided(self, tp_size: int) -> Mla:
        return replace(self, num_heads=divide("MLA heads", self.num_heads, tp_size))

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        rows = options.max_seq_len + options.replay.max_draft_len
        pools = {"latent_cache": Pool((1, rows, self.kv_rank + self.rope_dim), options.activation, "kv")}
        return pools if self.indexer is None else pools | self.indexer.pools(options, "indexer.")

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        selected = None
        if self.q_rank is None:
            q = net.linear(x, net.weight(f"{name}.q.weight"))
        else:
            low = net.linear(x, net.weight(f"{name}.q_a.weight"))
            low = net.rms_norm(low, net.weight(f"{name}.q_a_norm.weight"), self.q_epsilon or self.latent_epsilon)
            q = net.linear(low, net.weight(f"{name}.q_b.weight"))
            if self.indexer is not None:
                selected = self.indexer.selected(net, f"{name}.indexer", x, low, replay)
        q = net.unflatten(q, (self.num_heads, self.nope_dim + self.rope_dim))
        latent = net.linear(x, net.weight(f"{name}.kv_a.weight"))
        if self.rope_dim:
            q, q_rope = net.split(q, (self.nope_dim, self.rope_dim))
            latent, k_rope = net.split(latent, (self.kv_rank, self.rope_dim))
        latent = net.rms_norm(latent, net.weight(f"{name}.kv_a_norm.weight"), self.latent_epsilon)
        latent = net.unflatten(latent, (1, self.kv_rank))
        q = net.per_head(q, net.weight(f"{name}.k_up.weight"))
        if self.rope_dim:
            k_rope = net.unflatten(k_rope, (1, self.rope_dim))
            if self.rope is not None:
                q_rope, k_rope = net.rope(q_rope, self.rope), net.rope(k_rope, self.rope)
            q, latent = net.concat((q, q_rope)), net.concat((latent, k_rope))
        cache = net.cache_update(net.pool(f"{name}.latent_cache"), latent)
        values = net.slice_last(cache, self.kv_rank)
        out = net.attention(q, cache, values, (self.nope_dim + self.rope_dim) ** -0.5, selected=selected)
        out = net.per_head(out, net.weight(f"{name}.v_up.weight"))
        if self.gate is not None:
            gate = net.activation(net.linear(x, net.weight(f"{name}.gate.weight")), "sigmoid")
            per_head = (self.num_heads, 1 if self.gate == "head" else self.value_dim)
            out = net.multiply(out, net.unflatten(gate, per_head))
        return net.all_reduce(net.linear(net.flatten(out), net.weight(f"{name}.dense.weight")))
