"""Gated DeltaNet mixer: projections, convolution, gated delta rule, per-head norm and gate, output projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.recurrent import Recurrent
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide, row
from trtllm_replayssm.network.base import Activation, Network, Tensor
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """num_key_heads Hk of key_dim K, num_value_heads Hv of value_dim V; value head i reads key head i // (Hv/Hk).

    The rows of ``in_proj`` are q, k, v, z, b, a, each over all heads. beta_scale: 2 where eigenvalues may be negative.
    gate: activation of z, which multiplies the normed output. gates_apart: b and a have a weight of their own, ``gates``, as
    where the other rows stay quantised and these are not.
    """

    kind = "gated_delta"
    state_names = ("state", "ring_k", "ring_v", "ring_g", "ring_beta")

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_epsilon: float
    beta_scale: float = 1.0
    gate: Activation = "silu"
    gates_apart: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels of q, of k and of v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return sum(self.sizes)

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        keys, _, values = self.sizes
        key, value = Segment(keys, self.num_key_heads), Segment(values, self.num_value_heads)
        heads = Segment(self.num_value_heads, self.num_value_heads)
        conv = (key, key, value)
        per_head = Parameter((self.num_value_heads,), 0, (heads,), float32=True, nonzero=False)
        rows, gates = (*conv, value), (heads, heads)
        projections = (
            {"in_proj.weight": rows, "gates.weight": gates} if self.gates_apart else {"in_proj.weight": rows + gates}
        )
        return {
            **{name: Parameter((sum(s.size for s in cut), hidden_size), 0, cut) for name, cut in projections.items()},
            "conv1d.weight": Parameter((2 * keys + values, self.conv_kernel), 0, conv),
            "A_log": per_head,
            "dt_bias": per_head,
            "norm.weight": Parameter((self.value_dim,)),
            "out_proj.weight": row(hidden_size, values, self.num_value_heads),
        }

    def divided(self, tp_size: int) -> GatedDelta:
        return replace(
            self,
            num_key_heads=divide("GDN key heads", self.num_key_heads, tp_size),
            num_value_heads=divide("GDN value heads", self.num_value_heads, tp_size),
        )

    def attributes(self, replay: ReplayConfig) -> GatedDeltaAttributes:
        return GatedDeltaAttributes(
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            window=replay.window,
            ring_rows=replay.ring_rows,
            beta_scale=self.beta_scale,
            derived_fold=replay.fold == "derived",
            read_dtype=replay.state_read_dtype,
        )

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        q, k, v = self.sizes
        heads = self.num_value_heads
        projected = net.linear(x, net.weight(f"{name}.in_proj.weight"))
        if self.gates_apart:
            qkv, z = net.split(projected, (q + k + v, v))
            b, a = net.split(net.linear(x, net.weight(f"{name}.gates.weight")), (heads, heads))
        else:
            qkv, z, b, a = net.split(projected, (q + k + v, v, heads, heads))
        qkv = self.convolved(net, name, qkv, replay)
        A_log, dt_bias = net.weight(f"{name}.A_log"), net.weight(f"{name}.dt_bias")
        o = net.gated_delta(self.attributes(replay), qkv, a, b, A_log, dt_bias, self.state(net, name, replay))
        o = net.unflatten(o, (heads, self.value_dim))
        o = net.flatten(net.rms_norm(o, net.weight(f"{name}.norm.weight"), self.norm_epsilon))
        o = net.multiply(o, net.activation(z, self.gate))
        return net.all_reduce(net.linear(o, net.weight(f"{name}.out_proj.weight")))
