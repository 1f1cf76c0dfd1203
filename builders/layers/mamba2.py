"""Mamba-2 mixer: input projection, convolution, SSD recurrence, gated group norm, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.recurrent import Recurrent
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide, row
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """num_heads H of head_dim P, n_groups G of state_size N; convolution over H*P + 2*G*N channels.

    dt_min, dt_max: limits of the time step. norm_epsilon: of the gated RMSNorm, which works on each group apart; None where
    the gate is not followed by a norm. scales: factors of the projections z, x, B, C and dt; none where they are all 1.
    shared_group: this is one rank's part of a single group, whose B and C every rank has and whose norm spans the ranks.
    """

    kind = "mamba2"
    state_names = ("state", "ring_x", "ring_b", "ring_dt")
    feeds_back = False

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    norm_epsilon: float | None
    conv_bias: bool = True
    proj_bias: bool = False
    dt_min: float = 0.0
    dt_max: float = math.inf
    scales: tuple[float, ...] = ()
    shared_group: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Channels of z, x, B, C and dt."""
        bc = self.n_groups * self.state_size
        return self.inner_size, self.inner_size, bc, bc, self.num_heads

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.n_groups * self.state_size

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        inner = Segment(self.inner_size, self.num_heads)
        bc = Segment(self.n_groups * self.state_size, self.n_groups, replicate=True)
        heads = Segment(self.num_heads, self.num_heads)
        rows, conv = (inner, inner, bc, bc, heads), (inner, bc, bc)
        width = self.inner_size + self.conv_channels + self.num_heads
        per_head = Parameter((self.num_heads,), 0, (heads,), float32=True, nonzero=False)
        parameters = {
            "in_proj.weight": Parameter((width, hidden_size), 0, rows),
            "conv1d.weight": Parameter((self.conv_channels, self.conv_kernel), 0, conv),
            "A_log": per_head,
            "D": per_head,
            "dt_bias": per_head,
            "out_proj.weight": row(hidden_size, self.inner_size, self.num_heads),
        }
        if self.norm_epsilon is not None:
            parameters["norm.weight"] = Parameter((self.inner_size,), 0, (inner,))
        if self.conv_bias:
            parameters["conv1d.bias"] = Parameter((self.conv_channels,), 0, conv, nonzero=False)
        if self.proj_bias:
            parameters["in_proj.bias"] = Parameter((width,), 0, rows, nonzero=False)
            parameters["out_proj.bias"] = Parameter((hidden_size,), nonzero=False)
        return parameters

    def divided(self, tp_size: int) -> Mamba2:
        # Several groups stay whole, each on one rank and its heads with it; a single one is shared by all ranks.
        shared = self.n_groups == 1 and tp_size > 1
        return replace(
            self,
            num_heads=divide("Mamba-2 heads", self.num_heads, tp_size),
            n_groups=1 if shared else divide("Mamba-2 groups", self.n_groups, tp_size),
            shared_group=shared,
        )

    def attributes(self, replay: ReplayConfig) -> Mamba2Attributes:
        return Mamba2Attributes(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_size=self.state_size,
            n_groups=self.n_groups,
            window=replay.window,
            ring_rows=replay.ring_rows,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            stochastic_rounding=replay.state_rounding == "stochastic",
            read_dtype=replay.state_read_dtype,
        )

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        bias = net.weight(f"{name}.in_proj.bias") if self.proj_bias else None
        projected = net.linear(x, net.weight(f"{name}.in_proj.weight"), bias)
        if self.scales:
            parts = net.split(projected, self.sizes)
            projected = net.concat(tuple(net.scale(part, factor) for part, factor in zip(parts, self.scales)))
        gate, xbc, dt = net.split(projected, (self.inner_size, self.conv_channels, self.num_heads))
        xbc = self.convolved(net, name, xbc, replay, self.conv_bias)
        A_log, dt_bias, D = (net.weight(f"{name}.{w}") for w in ("A_log", "dt_bias", "D"))
        y = net.mamba2(self.attributes(replay), xbc, dt, A_log, dt_bias, D, self.state(net, name, replay))
        y = net.multiply(y, net.activation(gate, "silu"))
        if self.norm_epsilon is not None:
            weight = net.weight(f"{name}.norm.weight")
            y = net.rms_norm(y, weight, self.norm_epsilon, groups=self.n_groups, over_ranks=self.shared_group)
        y = net.all_reduce(net.linear(y, net.weight(f"{name}.out_proj.weight")))
        return net.add_bias(y, net.weight(f"{name}.out_proj.bias")) if self.proj_bias else y
