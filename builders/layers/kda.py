"""Kimi Delta Attention mixer: projections, convolution, delta rule with per-channel decay, gated norm, output projection."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.recurrent import Recurrent
from trtllm_replayssm.builders.parallel import Parameter, Segment, column, divide, row
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Kda(Recurrent):
    """num_heads H of head_dim D for keys and values.

    lower_bound: of the bounded gate; None for the softplus gate. gate_rank: width of the low-rank decay and output gates
    (f_a, f_b and g_a, g_b); None for full-rank f and g. full_output_gate: g is full-rank though f is not.
    conv_float32, norm_float32: the convolution's taps and the output norm stay in float32.
    """

    kind = "kda"
    state_names = ("state", "ring_k", "ring_v", "ring_g", "ring_beta")

    num_heads: int
    head_dim: int
    conv_kernel: int
    norm_epsilon: float
    lower_bound: float | None = None
    gate_rank: int | None = None
    conv_float32: bool = False
    full_output_gate: bool = False
    norm_float32: bool = False

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return 3 * self.channels

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        heads, width = self.num_heads, self.channels
        head_channels, head = Segment(width, heads), Segment(heads, heads)
        qkv = (head_channels,) * 3
        parameters = {
            "qkv.weight": Parameter((3 * width, hidden_size), 0, qkv),
            "conv1d.weight": Parameter((3 * width, self.conv_kernel), 0, qkv, float32=self.conv_float32),
            "b.weight": column(heads, hidden_size, heads),
            "A_log": Parameter((heads,), 0, (head,), float32=True, nonzero=False),
            "dt_bias": Parameter((width,), 0, (head_channels,), float32=True, nonzero=False),
            "norm.weight": Parameter((self.head_dim,), float32=self.norm_float32),
            "out_proj.weight": row(hidden_size, width, heads),
        }
        for gate in ("f", "g"):
            rank = self.rank(gate)
            if rank is None:
                parameters[f"{gate}.weight"] = column(width, hidden_size, heads)
            else:
                parameters[f"{gate}_a.weight"] = Parameter((rank, hidden_size))
                parameters[f"{gate}_b.weight"] = column(width, rank, heads)
        return parameters

    def rank(self, gate: str) -> int | None:
        """Width of f (decay) or g (output), None for a full-rank gate."""
        return None if gate == "g" and self.full_output_gate else self.gate_rank

    def divided(self, tp_size: int) -> Kda:
        return replace(self, num_heads=divide("KDA heads", self.num_heads, tp_size))

    def attributes(self, replay: ReplayConfig) -> KdaAttributes:
        return KdaAttributes(
            num_heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            window=replay.window,
            ring_rows=replay.ring_rows,
            lower_bound=self.lower_bound,
            derived_fold=replay.fold == "derived",
            read_dtype=replay.state_read_dtype,
        )

    def gate_logits(self, net: Network, name: str, x: Tensor, gate: str) -> Tensor:
        """f (decay) or g (output) logits ``[rows, T, H*D]``."""
        if self.rank(gate) is None:
            return net.linear(x, net.weight(f"{name}.{gate}.weight"))
        return net.linear(net.linear(x, net.weight(f"{name}.{gate}_a.weight")), net.weight(f"{name}.{gate}_b.weight"))

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        qkv = self.convolved(net, name, net.linear(x, net.weight(f"{name}.qkv.weight")), replay)
        f, b = self.gate_logits(net, name, x, "f"), net.linear(x, net.weight(f"{name}.b.weight"))
        A_log, dt_bias = net.weight(f"{name}.A_log"), net.weight(f"{name}.dt_bias")
        o = net.kda(self.attributes(replay), qkv, f, b, A_log, dt_bias, self.state(net, name, replay))
        o = net.unflatten(o, (self.num_heads, self.head_dim))
        o = net.flatten(net.rms_norm(o, net.weight(f"{name}.norm.weight"), self.norm_epsilon))
        o = net.multiply(o, net.activation(self.gate_logits(net, name, x, "g"), "sigmoid"))
        return net.all_reduce(net.linear(o, net.weight(f"{name}.out_proj.weight")))
