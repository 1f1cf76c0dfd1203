"""Drives the reference plugins as an engine does: convolution, recurrence and cursors together, on random requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import oracle
import torch
from torch import Tensor

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.reference import conv, delta_rule
from trtllm_replayssm.plugins.reference import mamba2 as mamba2_reference
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.materialise import materialise
from trtllm_replayssm.replay import ReplayConfig

#: Per-token inputs of a request, ``[L, width]`` each: ``packed`` goes through the convolution, the rest are gates.
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Spec:
    """One recurrence with its sizes. heads: key heads or groups, and value heads. dims: key (state) and value width."""

    kind: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    kernel: int = 4
    decay_bias: float = 0.0
    rate: tuple[float, float] = (-1.5, 1.0)

    @property
    def channels(self) -> int:
        return 2 * self.heads[0] * self.dims[0] + self.heads[1] * self.dims[1]

    @property
    def gates(self) -> dict[str, int]:
        heads, width = self.heads[1], self.dims[0]
        return {
            "mamba2": {"dt": heads},
            "gated_delta": {"a": heads, "b": heads},
            "kda": {"f": heads * width, "b": heads},
        }[self.kind]

    def attributes(self, replay: ReplayConfig) -> Any:
        (groups, heads), (width, values) = self.heads, self.dims
        ring: dict[str, Any] = {"window": replay.window, "ring_rows": replay.ring_rows} | dict(self.options)
        ring["read_dtype"] = replay.state_read_dtype
        if self.kind == "mamba2":
            return Mamba2Attributes(heads, values, width, groups, **ring)
        ring["derived_fold"] = replay.fold == "derived"
        if self.kind == "kda":
            return KdaAttributes(heads, width, values, **ring)
        return GatedDeltaAttributes(groups, heads, width, values, **ring)

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        heads, low, high = self.heads[1], *self.rate
        biases = heads * self.dims[0] if self.kind == "kda" else heads
        return {
            "conv": torch.randn(self.channels, self.kernel, generator=random) / math.sqrt(self.kernel),
            "conv_bias": torch.randn(self.channels, generator=random) / 4,
            "A_log": low + (high - low) * torch.rand(heads, generator=random),
            "dt_bias": torch.randn(biases, generator=random) / 2 + self.decay_bias,
            "D": torch.randn(heads, generator=random),
        }

    def inputs(self, length: int, seed: int = 1) -> Inputs:
        random = torch.Generator().manual_seed(seed)
        widths = {"packed": self.channels} | self.gates
        return {name: torch.randn(length, width, generator=random) for name, width in widths.items()}

    def expected(
        self, weights: dict[str, Tensor], inputs: Inputs, since: int = 0, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The oracle's outputs ``[L, Hv * V]`` and states ``[L + 1, Hv, V, K]``, float64.

        start: a state ``[Hv, V, K]`` after the first ``since`` tokens; the outputs are those of the tokens behind them.
        """
        (groups, heads), (width, values) = self.heads, self.dims
        first = 0.0 if start is None else start.double().numpy()
        w = {name: value.double().numpy() for name, value in weights.items()}
        gates = {name: inputs[name][since:].double().numpy() for name in self.gates}
        packed = oracle.conv(inputs["packed"], weights["conv"], weights["conv_bias"]).numpy()[since:]
        keys = groups * width
        if self.kind == "mamba2":
            inner = heads * values
            x, b, c = packed[:, :inner], packed[:, inner : inner + keys], packed[:, inner + keys :]
            limits = (self.options.get("dt_min", 0.0), self.options.get("dt_max", math.inf))
            shared = (-1, groups, width)
            y, states = oracle.mamba2(
                x.reshape(-1, heads, values), b.reshape(shared), c.reshape(shared),
                gates["dt"], w["A_log"], w["dt_bias"], w["D"], limits, first,
            )  # fmt: skip
        else:
            q, k, v = packed[:, :keys], packed[:, keys : 2 * keys], packed[:, 2 * keys :]
            if self.kind == "kda":
                f, bias = gates["f"].reshape(-1, heads, width), w["dt_bias"].reshape(heads, width)
                g, beta = oracle.kda_gates(f, gates["b"], w["A_log"], bias, self.options.get("lower_bound"))
            else:
                scale = self.options.get("beta_scale", 1.0)
                g, beta = oracle.gated_delta_gates(gates["a"], gates["b"], w["A_log"], w["dt_bias"], width, scale)
            shared = (-1, groups, width)
            q, k, v = q.reshape(shared), k.reshape(shared), v.reshape(-1, heads, values)
            y, states = oracle.delta_rule(q, k, v, g, beta, first)
        return torch.from_numpy(y).flatten(1), torch.from_numpy(states)


MAMBA2 = Spec("mamba2", (2, 4), (8, 6))
GATED_DELTA = Spec("gated_delta", (2, 4), (8, 6))
KDA = Spec("kda", (3, 3), (8, 6))
KDA_BOUNDED = Spec("kda", (3, 3), (8, 6), {"lower_bound": -5.0})
SPECS = {"mamba2": MAMBA2, "gated_delta": GATED_DELTA, "kda": KDA, "kda_bounded": KDA_BOUNDED}


@dataclass
class Row:
    """One row of a step: the tokens that slot sees; slot -1 is padding."""

    slot: int
    inputs: Inputs
    mode: RowMode = RowMode.DECODE

    @property
    def tokens(self) -> int:
        return len(self.inputs["packed"])


class Simulator:
    """Pools and cursors of one layer. Pools start full of ``fill``; float64 pools are float64 but for read copies."""

    def __init__(
        self,
        spec: Spec,
        replay: ReplayConfig,
        slots: int = 3,
        activation: torch.dtype = torch.float64,
        fill: float = math.nan,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.spec, self.replay, self.activation = spec, replay, activation
        self.weights = weights or spec.weights()
        self.attributes = spec.attributes(replay)
        self.conv_attributes = CausalConvAttributes.create(spec.channels, spec.kernel, replay)
        wide = activation == torch.float64
        state = getattr(torch, replay.state_dtype)
        ring = activation if replay.ring_dtype == "auto" else getattr(torch, replay.ring_dtype)
        described = self.attributes.pools(activation, state, ring) | self.conv_attributes.pools(activation)
        self.pools = {
            name: self.allocate(replace(p, dtype=torch.float64) if wide and p.kind != "copy" else p, slots, fill)
            for name, p in described.items()
        }
        self.cursors = torch.zeros(slots, CURSOR_WORDS, dtype=torch.int32)

    @staticmethod
    def allocate(pool: Pool, slots: int, fill: float) -> Tensor:
        # Raw bits of a read copy: E4M3's NaN.
        return pool.allocate(slots).fill_(0x7F if pool.dtype == torch.int8 else fill)

    def recurrent_pools(self) -> dict[str, Tensor]:
        return {name: pool for name, pool in self.pools.items() if name != "conv_ring"}

    def step(self, rows: list[Row], tokens: int | None = None) -> list[Tensor]:
        """Run one step of ``tokens`` (T) a row; padding is NaN. Returns each row's outputs ``[its tokens, Hv * V]``."""
        tokens = tokens or max(row.tokens for row in rows)
        batch = {
            name: torch.full((len(rows), tokens, value.shape[1]), math.nan, dtype=self.activation)
            for name, value in rows[0].inputs.items()
        }
        for i, row in enumerate(rows):
            for name, value in row.inputs.items():
                batch[name][i, : row.tokens] = value.to(self.activation)
        plan = advance(
            AdvanceAttributes(self.replay.window),
            self.cursors,
            torch.tensor([row.slot for row in rows], dtype=torch.int32),
            torch.tensor([row.tokens for row in rows], dtype=torch.int32),
            torch.tensor([int(row.mode) for row in rows], dtype=torch.int32),
            tokens,
        )
        y = self.layer(batch, plan)
        for i, row in enumerate(rows):
            kept = row.tokens if row.slot >= 0 else 0
            assert not y[i, kept:].any(), "padding rows and tokens answer zero"
        return [y[i, : row.tokens] for i, row in enumerate(rows)]

    def layer(self, batch: Inputs, plan: Tensor) -> Tensor:
        w, a, pools = self.weights, self.attributes, self.recurrent_pools()
        packed = conv.causal_conv(
            self.conv_attributes, batch["packed"], w["conv"], w["conv_bias"], plan, self.pools["conv_ring"]
        )
        if self.spec.kind == "mamba2":
            return mamba2_reference.mamba2(a, packed, batch["dt"], w["A_log"], w["dt_bias"], w["D"], plan, pools)
        if self.spec.kind == "kda":
            return delta_rule.kda(a, packed, batch["f"], batch["b"], w["A_log"], w["dt_bias"], plan, pools)
        return delta_rule.gated_delta(a, packed, batch["a"], batch["b"], w["A_log"], w["dt_bias"], plan, pools)

    def commit(self, slot: int, accepted: int) -> None:
        self.cursors[slot, Cursor.COMMITTED] += accepted

    def committed(self, slot: int) -> int:
        return int(self.cursors[slot, Cursor.COMMITTED])

    def folded(self, slot: int) -> int:
        return int(self.cursors[slot, Cursor.FOLDED])

    def decode(self, slot: int, inputs: Inputs, mode: RowMode = RowMode.DECODE) -> Tensor:
        """One step of one row whose tokens are all accepted."""
        (y,) = self.step([Row(slot, inputs, mode)])
        self.commit(slot, len(y))
        return y

    def materialise(self, source: int, destination: int, prefix: int) -> None:
        dtype = torch.promote_types(self.pools["state"].dtype, torch.float32)
        materialise(self.recurrence(dtype), self.recurrent_pools(), source, destination, self.folded(source), prefix)

    def recurrence(self, dtype: torch.dtype) -> Any:
        if self.spec.kind == "mamba2":
            return Mamba2Recurrence(self.weights["A_log"].to(dtype), self.weights["D"].to(dtype))
        return delta_rule.DeltaRule(self.replay.fold == "derived")

    def copy_slot(self, source: int, destination: int) -> None:
        """What preempt and resume do: every pool's slot and the cursor row travel together."""
        for pool in (*self.pools.values(), self.cursors):
            pool[destination] = pool[source]


def part(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {name: value[start:stop] for name, value in inputs.items()}


def joined(*parts: Inputs) -> Inputs:
    return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}


def garbage(spec: Spec, count: int, value: float | None, seed: int) -> Inputs:
    """Draft tokens that will be rejected: random, or all ``value``."""
    inputs = spec.inputs(count, seed)
    return inputs if value is None else {name: torch.full_like(x, value) for name, x in inputs.items()}


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Largest difference within ``relative`` of the expected values' root mean square; NaN fails."""
    scale = expected.double().square().mean().sqrt().item()
    worst = (actual.double() - expected).abs().max().item()
    assert worst <= relative * scale, f"differs by {worst / scale:.2e} of the scale, allowed {relative:.0e}"
