"""Grouped-query attention with the options of hybrid models: partial RoPE, q/k norms, an output gate, a sliding window."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.builders.layers.indexer import Indexer
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide, row
from trtllm_replayssm.network.base import Network, Rope, Tensor
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Attention(Layer):
    """num_heads query heads and num_kv_heads key/value heads of head_dim D.

    scale: of the scores. rope: None for no position embedding. qk_norm_epsilon: RMSNorm of q and k per head, zero-centred
    weights if qk_norm_zero_centred; None for none. qk_norm_joint: over all heads at once, before they are told apart.
    output_gate: sigmoid gate per channel, from the input. window: tokens that a token sees, itself among them; None for all.
    indexer: chooses the positions that are attended to; None for all.
    The rows of ``qkv`` are q, gate (if any), k, v, each over all heads.
    """

    kind = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm_epsilon: float | None = None
    qk_norm_zero_centred: bool = False
    output_gate: bool = False
    bias: bool = False
    qk_norm_joint: bool = False
    window: int | None = None
    indexer: Indexer | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of q, gate (if any), k, v."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (q, q, kv, kv) if self.output_gate else (q, kv, kv)

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        q = Segment(self.num_heads * self.head_dim, self.num_heads)
        kv = Segment(self.num_kv_heads * self.head_dim, self.num_kv_heads, replicate=True)
        rows = (q, q, kv, kv) if self.output_gate else (q, kv, kv)
        width = sum(self.sizes)
        parameters = {
            "qkv.weight": Parameter((width, hidden_size), 0, rows),
            "dense.weight": row(hidden_size, q.size, self.num_heads),
        }
        if self.qk_norm_epsilon is not None:
            for norm, part in (("q_norm", q), ("k_norm", kv)):
                shape, axis, cut = ((part.size,), 0, (part,)) if self.qk_norm_joint else ((self.head_dim,), None, ())
                parameters[f"{norm}.weight"] = Parameter(shape, axis, cut, nonzero=not self.qk_norm_zero_centred)
        if self.bias:
            parameters["qkv.bias"] = Parameter((width,), 0, rows, nonzero=False)
            parameters["dense.bias"] = Parameter((hidden_size,), nonzero=False)
        if self.indexer is not None:
            parameters |= {f"indexer.{n}": p for n, p in self.indexer.parameters(hidden_size, hidden_size).items()}
        return parameters

    def divided(self, tp_size: int) -> Attention:
        # Copies of a head on several ranks would count several times in a norm over all heads.
        replicate = not self.qk_norm_joint
        return replace(
            self,
            num_heads=divide("attention heads", self.num_heads, tp_size),
            num_kv_heads=divide("key/value heads", self.num_kv_heads, tp_size, replicate),
        )

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        rows = options.max_seq_len + options.replay.max_draft_len
        cache = Pool((self.num_kv_heads, rows, self.head_dim), options.activation, "kv")
        pools = {"k_cache": cache, "v_cache": cache}
        return pools if self.indexer is None else pools | self.indexer.pools(options, "indexer.")

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        bias = net.weight(f"{name}.qkv.bias") if self.bias else None
        q, *gate, k, v = net.split(net.linear(x, net.weight(f"{name}.qkv.weight"), bias), self.sizes)
        q = self.prepared(net, name, "q_norm", q, self.num_heads)
        k = self.prepared(net, name, "k_norm", k, self.num_kv_heads)
        keys = net.cache_update(net.pool(f"{name}.k_cache"), k)
        values = net.cache_update(net.pool(f"{name}.v_cache"), net.unflatten(v, (self.num_kv_heads, self.head_dim)))
        selected = None if self.indexer is None else self.indexer.selected(net, f"{name}.indexer", x, x, replay)
        out = net.flatten(net.attention(q, keys, values, self.scale, self.window, selected))
        if self.output_gate:
            out = net.multiply(out, net.activation(gate[0], "sigmoid"))
        out = net.all_reduce(net.linear(out, net.weight(f"{name}.dense.weight")))
        return net.add_bias(out, net.weight(f"{name}.dense.bias")) if self.bias else out

    def prepared(self, net: Network, name: str, norm: str, x: Tensor, heads: int) -> Tensor:
        """q or k ``[rows, T, heads, D]`` after its norm and rotation."""
        by_head, joint = (heads, self.head_dim), self.qk_norm_joint
        x = x if joint else net.unflatten(x, by_head)
        if self.qk_norm_epsilon is not None:
            weight = net.weight(f"{name}.{norm}.weight")
            x = net.rms_norm(x, weight, self.qk_norm_epsilon, self.qk_norm_zero_centred, over_ranks=joint)
        x = net.unflatten(x, by_head) if joint else x
        return x if self.rope is None else net.rope(x, self.rope)
