"""Gated delta rule and KDA kernels of flash-linear-attention (fla), SGLang and vLLM.

States are ``[slots, value heads, V, K]`` like ours, but for fla, which puts K first and returns new states. fla is given
finished gates; the others compute them, as ours do. Rows use slots from 1 on, because vLLM keeps slot 0 for no request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import loader, peer
from benchmarks.problem import ACTIVATION, DEVICE, Problem
from benchmarks.subject import Ringed, only_for


class Layer:
    """One layer's tensors in the peers' shapes; activations are lists over steps."""

    def __init__(self, problem: Problem) -> None:
        s: Any = problem.case.shape
        self.packed, self.a, self.b = map(list, problem.inputs)
        self.q, self.k, self.v = (list(part) for part in zip(*(problem.split(i) for i in range(len(self.packed)))))
        self.A_log, self.dt_bias = problem.weights
        self.scale = s.dim**-0.5
        self.state = torch.cat([torch.zeros_like(problem.state[:1]), problem.state])
        self.out = torch.empty_like(self.v[0])

    def flat(self, part: list[Tensor], i: int) -> Tensor:
        """All tokens of all rows on one axis."""
        return part[i].flatten(0, 1)


class Peer(peer.Peer):
    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.layers = [Layer(problem) for problem in problems]

    def gate_ring(self, rows: int) -> Tensor:
        gates = (self.shape.dim,) if self.shape.per_channel else ()
        return self.ring(self.shape.value_heads, rows, *gates, dtype=torch.float32)


# ---- the ordinary recurrence -----------------------------------------------------------------------------------------


class Fla(Peer):
    """Recurrence (one token) or chunked form (prefill); writes its states to new tensors."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens == 1 or self.case.prefills)
        layer = "kda" if self.shape.per_channel else "gated_delta_rule"
        form = "chunk" if self.case.prefills else "fused_recurrent"
        self.run = getattr(loader.whole(f"fla.ops.{layer}"), f"{form}_{layer}")
        self.states = [problem.state.transpose(-1, -2).float().contiguous() for problem in problems]
        self.gates = [[problem.gates(i) for i in range(len(problem.inputs[0]))] for problem in problems]

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def step(self, layer: int, i: int) -> Tensor:
        at, (g, beta) = self.layers[layer], self.gates[layer][i]
        if self.case.prefills:
            beta = beta.to(ACTIVATION)
        y, self.states[layer] = self.run(
            at.q[i], at.k[i], at.v[i], g, beta=beta, scale=at.scale, initial_state=self.states[layer],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return y.flatten(2)


class SglangFused(Peer):
    """Gates and recurrence in one kernel; also the verify steps below."""

    tokens: tuple[int, ...] = (1,)

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens in self.tokens)
        module = loader.sglang("attention.linear.fused_sigmoid_gating_recurrent")
        self.update = module.fused_sigmoid_gating_delta_rule_update
        count, rows = self.case.tokens, self.case.batch
        self.starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=DEVICE)
        self.rows = torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def step(self, layer: int, i: int) -> Tensor:
        return self.call(layer, i)

    def call(self, layer: int, i: int, **more: Any) -> Tensor:
        at = self.layers[layer]
        q, k, v = (at.flat(part, i)[None] for part in (at.q, at.k, at.v))
        y = self.update(
            A_log=at.A_log, a=at.flat(at.a, i), dt_bias=at.dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v,
            b=at.flat(at.b, i), initial_state_source=at.state, initial_state_indices=self.slots, scale=at.scale,
            use_qk_l2norm_in_kernel=True, cu_seqlens=self.starts, is_kda=self.shape.per_channel, **more,
        )  # fmt: skip
        return y.view(*at.out.shape).flatten(2)


class Packed(Peer):
    """Decode from the packed activations of the convolution."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens == 1)
        self.update = self.find()

    @abstractmethod
    def find(self) -> Any:
        """The project's function. Raises Unavailable without it."""

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        self.update(
            at.packed[i][:, 0], at.a[i][:, 0], at.b[i][:, 0], at.A_log, at.dt_bias, at.scale, at.state, at.out, self.slots,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return at.out.flatten(2)


class SglangPacked(Packed):
    def find(self) -> Any:
        layer = "kda" if self.shape.per_channel else "gated_delta_rule"
        return getattr(loader.sglang("attention.fla.fused_recurrent"), f"fused_recurrent_{layer}_packed_decode")


class VllmPacked(Packed):
    def find(self) -> Any:
        only_for(not self.shape.per_channel)
        module = loader.vllm("third_party.flash_linear_attention.ops.fused_recurrent")
        return module.fused_recurrent_gated_delta_rule_packed_decode


# ---- with a ring -----------------------------------------------------------------------------------------------------


class SglangReplay(Ringed, Peer):
    """One token a step; ``window`` rows, folded with the token that fills them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens == 1)
        module = loader.sglang("attention.linear.fused_recurrent_linear_replayssm")
        self.update = module.fused_recurrent_linear_replayssm_decode
        s, rows = self.shape, self.case.window
        self.rings = [
            (self.ring(s.value_heads, rows, s.dim), self.ring(s.key_heads, rows, s.dim), self.gate_ring(rows))
            for _ in problems
        ]
        self.write_pos = torch.zeros(self.case.batch, dtype=torch.int32, device=DEVICE)

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        self.write_pos.copy_(self.per_row(histories))

    def commit(self, accepted: int) -> None:
        self.place([(self.histories[0] + 1) % self.case.window])

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        dt_bias = at.dt_bias.unflatten(0, (self.shape.value_heads, -1)) if self.shape.per_channel else at.dt_bias
        a = at.a[i][:, 0].unflatten(-1, (self.shape.value_heads, -1)) if self.shape.per_channel else at.a[i][:, 0]
        self.update(
            at.packed[i][:, 0], a, at.b[i][:, 0], at.A_log, dt_bias, at.scale, at.state, *self.rings[layer], at.out, self.slots,
            self.write_pos, use_qk_l2norm_in_kernel=True, is_kda=self.shape.per_channel,
        )  # fmt: skip
        return at.out.flatten(2)


class SglangRing(Ringed, Peer):
    """Verify steps that answer from checkpoint and ring; the flag to fold is set by the commit before."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(not self.shape.per_channel)
        only_for(self.case.tokens in (2, 4, 8))
        self.verify = loader.sglang("attention.linear.gdn_replayssm_spec_decode").gdn_replayssm_spec_decode
        s, batch = self.shape, self.case.batch
        #: A power of two that holds two verify steps and more.
        self.length = length = max(self.case.window, 4 * self.case.tokens)
        self.rings = [
            (
                self.ring(s.value_heads, length, s.dim),
                self.ring(s.key_heads, length, s.dim),
                self.ring(s.value_heads, length, dtype=torch.float32),
                self.ring(s.value_heads, length, s.dim),
                self.ring(s.key_heads, length, s.dim),
                self.ring(s.value_heads, length, dtype=torch.float32),
            )
            for _ in problems
        ]
        self.write_pos, self.base = self.ring(dtype=torch.int32), self.ring(dtype=torch.int32)
        self.is_flush = self.ring(dtype=torch.int8)
        self.first = 0
        self.starts = torch.arange(0, batch * self.case.tokens + 1, self.case.tokens, dtype=torch.int32, device=DEVICE)
        self.place([0])

    def folds(self, history: int) -> bool:
        return history + 2 * self.case.tokens > self.length

    def cycle(self) -> list[int]:
        histories = [self.case.tokens]
        while not self.folds(histories[-1]):
            histories.append(histories[-1] + self.case.tokens)
        return histories

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        self.write_pos[1:] = self.per_row(histories)
        self.is_flush[1:] = self.per_row([int(self.folds(h)) for h in histories]).to(torch.int8)
        self.base.fill_(self.first)

    def commit(self, accepted: int) -> None:
        held = self.histories[0]
        folds = self.folds(held)
        self.first = (self.first + held * folds) % self.length
        self.place([accepted if folds else held + accepted])

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        activations = (at.flat(part, i) for part in (at.q, at.k, at.v, at.a, at.b))
        self.verify(
            *activations, at.A_log, at.dt_bias, at.state, *self.rings[layer], at.out.flatten(0, 1), self.starts, self.slots,
            self.slots, self.write_pos, self.base, self.is_flush, self.length, self.case.tokens, scale=at.scale,
        )  # fmt: skip
        return at.out.flatten(2)


class SglangFold(SglangFused):
    """Verify steps that keep raw inputs; every commit folds the accepted ones (timed with the step)."""

    tokens = (2, 4, 8)

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        s, count = self.shape, self.case.tokens
        name = "kda_replayssm_spec_decode" if s.per_channel else "gdn_replayssm_spec_fold"
        function = "commit_kda_replayssm_spec_all_layers" if s.per_channel else "commit_gdn_replayssm_fold_all_layers"
        self.fold = getattr(loader.sglang(f"attention.linear.{name}"), function)
        self.all_accepted = self.per_row([count])
        self.rings = [
            (
                self.ring(s.value_heads, count, s.dim),
                self.ring(s.key_heads, count, s.dim),
                self.gate_ring(count),
                self.ring(s.value_heads, count, dtype=torch.float32),
            )
            for _ in problems
        ]

    def bytes(self) -> float:
        return self.case.standard_bytes() + self.case.batch * self.case.traffic.state

    def step(self, layer: int, i: int) -> Tensor:
        names = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")
        rings = dict(zip(names, self.rings[layer]))
        return self.call(layer, i, disable_state_update=True, cache_ring=True, cache_steps=self.case.tokens, **rings)

    def fold_layer(self, layer: int, accepted: Tensor) -> None:
        rings = (ring[None] for ring in self.rings[layer])
        state = self.layers[layer].state[None]
        self.fold(state, *rings, self.slots, accepted, self.case.tokens, self.shape.key_heads, null_block_id=-1)

    def work(self, layer: int) -> None:
        self.step(layer, 0)
        self.fold_layer(layer, self.all_accepted)

    def commit(self, accepted: int) -> None:
        for layer in range(len(self.layers)):
            self.fold_layer(layer, self.per_row([accepted]))


# ---- a state saved after every draft ---------------------------------------------------------------------------------


class SglangSnapshots(peer.Snapshots, SglangFused):
    def step(self, layer: int, i: int) -> Tensor:
        buffers = {"intermediate_states_buffer": self.saved[layer], "intermediate_state_indices": self.rows}
        return self.call(layer, i, disable_state_update=True, cache_steps=self.case.tokens, **buffers)


PEERS: dict[str, type[Peer]] = {
    "fla": Fla,
    "sglang": SglangFused,
    "sglang packed": SglangPacked,
    "vllm packed": VllmPacked,
    "sglang replay": SglangReplay,
    "sglang ring": SglangRing,
    "sglang fold": SglangFold,
    "sglang snapshots": SglangSnapshots,
}
