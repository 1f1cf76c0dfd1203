"""Mamba-2 kernels of mamba_ssm, vLLM, SGLang and FlashInfer.

All read and write states ``[slots, heads, head_dim, state_size]`` like ours. Rows use slots from 1 on, because vLLM keeps
slot 0 for rows without a request. Weights of a head are views that repeat over its channels, which every peer asks for.
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
    """One layer's tensors in the peers' shapes; activations are lists over steps of ``[batch, T, heads, ...]``."""

    def __init__(self, problem: Problem) -> None:
        s: Any = problem.case.shape
        A_log, dt_bias, D = problem.weights
        steps = [problem.split(i) for i in range(len(problem.inputs[0]))]
        self.x, self.B, self.C = ([step[part] for step in steps] for part in range(3))
        self.dt = list(problem.inputs[1])
        self.dt_repeated = [dt[..., None].expand(*dt.shape, s.head_dim) for dt in self.dt]
        self.A = (-A_log.exp())[:, None, None].expand(s.heads, s.head_dim, s.state_size)
        self.D, self.dt_bias = (w.to(ACTIVATION)[:, None].expand(s.heads, s.head_dim) for w in (D, dt_bias))
        self.state = torch.cat([torch.zeros_like(problem.state[:1]), problem.state])
        self.out = torch.empty_like(self.x[0])


class Peer(peer.Peer):
    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.layers = [Layer(problem) for problem in problems]


# ---- the ordinary recurrence -----------------------------------------------------------------------------------------


class Standard(Peer):
    """``selective_state_update``, which all four projects have under one name with nearly the same arguments."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens == 1)
        self.update = self.find()

    @abstractmethod
    def find(self) -> Any:
        """The project's function. Raises Unavailable without it."""

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def arguments(self, layer: Layer, i: int) -> tuple[Tensor, ...]:
        x, dt, B, C = (part[i][:, 0] for part in (layer.x, layer.dt_repeated, layer.B, layer.C))
        return layer.state, x, dt, layer.A, B, C

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        named = {"D": at.D, "dt_bias": at.dt_bias, "dt_softplus": True, "state_batch_indices": self.slots}
        self.update(*self.arguments(at, i), **named, out=at.out[:, 0])
        return at.out.flatten(2)


class MambaSsmStandard(Standard):
    def find(self) -> Any:
        return loader.mamba_ssm("selective_state_update").selective_state_update

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        named = {"D": at.D, "dt_bias": at.dt_bias, "dt_softplus": True, "state_batch_indices": self.slots}
        return self.update(*self.arguments(at, i), **named)[:, None].flatten(2)


class VllmStandard(Standard):
    def find(self) -> Any:
        return loader.vllm("model_executor.layers.mamba.ops.mamba_ssm").selective_state_update


class SglangStandard(Standard):
    def find(self) -> Any:
        return loader.sglang("mamba.triton_ops.mamba_ssm").selective_state_update


class FlashinferStandard(Standard):
    def find(self) -> Any:
        return loader.whole("flashinfer.mamba").selective_state_update


# ---- with a ring -----------------------------------------------------------------------------------------------------


class VllmReplay(Ringed, Peer):
    """One token a step; ``window`` rows, folded with the token that fills them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens == 1)
        name = "selective_state_update_replayssm_output_only"
        self.update = getattr(loader.vllm(f"model_executor.layers.mamba.ops.{name}"), name)
        s, rows, f32 = self.shape, self.case.window, torch.float32
        self.rings = [
            (
                self.ring(s.heads, rows, s.head_dim),
                self.ring(s.heads, rows, dtype=f32),
                self.ring(s.groups, rows, s.state_size),
            )
            for _ in problems
        ]
        self.products = torch.zeros(self.case.batch, s.groups, rows, device=DEVICE)
        self.write_pos = torch.zeros(self.case.batch, dtype=torch.int32, device=DEVICE)
        self.is_flush = torch.zeros(self.case.batch, dtype=torch.int8, device=DEVICE)
        self.place([0])

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        self.write_pos.copy_(self.per_row(histories))
        self.is_flush.copy_(self.write_pos == self.case.window - 1)

    def commit(self, accepted: int) -> None:
        self.place([(self.histories[0] + 1) % self.case.window])

    def step(self, layer: int, i: int) -> Tensor:
        at, (x, dt, B) = self.layers[layer], self.rings[layer]
        parts = (part[i][:, 0] for part in (at.x, at.dt_repeated))
        self.update(
            at.state, *parts, at.A, at.B[i][:, 0], at.C[i][:, 0], at.D, at.dt_bias, dt_softplus=True, x_cache=x, dt_cache=dt,
            B_cache=B, bc_pre=self.products, write_pos=self.write_pos, is_flush=self.is_flush,
            max_cache_len=self.case.window, state_batch_indices=self.slots, out=at.out[:, 0],
        )  # fmt: skip
        return at.out.flatten(2)


class FlashinferReplay(Ringed, Peer):
    """``checkpointing_ssu``: up to 16 tokens a step; a step that might not leave room folds the rows before it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.tokens in (1, 2, 4, 8))
        self.module = loader.whole("flashinfer.mamba")
        s, tokens, window, f32 = self.shape, self.case.tokens, self.case.window, torch.float32
        self.rows = rows = window + tokens
        self.rings = [
            (
                self.ring(s.heads, rows, s.head_dim),
                self.ring(s.groups, rows, s.state_size),
                self.ring(s.heads, rows, dtype=f32),
            )
            for _ in problems
        ]
        self.start, self.held = self.ring(dtype=torch.int32), self.ring(dtype=torch.int32)
        self.first = 0
        self.scratch = self.module.allocate_checkpointing_ssu_scratch(
            self.case.batch, s.heads, tokens, window, ACTIVATION, DEVICE
        )
        self.place([0])

    def cycle(self) -> list[int]:
        return list(range(self.case.tokens, self.case.window + 1, self.case.tokens))

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        self.start.fill_(self.first)
        self.held[1:] = self.per_row(histories)

    def commit(self, accepted: int) -> None:
        held = self.histories[0]
        folds = held + 2 * self.case.tokens > self.rows
        self.first = (self.first + held * folds) % self.rows
        self.place([accepted if folds else held + accepted])

    def step(self, layer: int, i: int) -> Tensor:
        at, scratch = self.layers[layer], self.scratch
        self.module.checkpointing_ssu(
            at.state, *self.rings[layer], self.start, self.held, at.x[i], at.dt_repeated[i], at.A, at.B[i], at.C[i], at.out,
            D=at.D, dt_bias=at.dt_bias, dt_softplus=True, state_batch_indices=self.slots,
            cb_scaled=scratch[0], cumAdt_vec=scratch[1], cb_old=scratch[2],
        )  # fmt: skip
        return at.out.flatten(2)


# ---- a state saved after every draft ---------------------------------------------------------------------------------


class Snapshots(peer.Snapshots, Peer):
    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.update = self.find()
        self.rows = torch.arange(self.case.batch, dtype=torch.int32, device=DEVICE)

    @abstractmethod
    def find(self) -> Any:
        """The project's function. Raises Unavailable without it."""

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        self.update(
            at.state, at.x[i], at.dt_repeated[i], at.A, at.B[i], at.C[i], D=at.D, dt_bias=at.dt_bias, dt_softplus=True,
            state_batch_indices=self.slots, out=at.out, disable_state_update=True, cache_steps=self.case.tokens,
            intermediate_states_buffer=self.saved[layer], intermediate_state_indices=self.rows,
        )  # fmt: skip
        return at.out.flatten(2)


class SglangSnapshots(Snapshots):
    def find(self) -> Any:
        return loader.sglang("mamba.triton_ops.mamba_ssm").selective_state_update


class FlashinferSnapshots(Snapshots):
    def find(self) -> Any:
        return loader.whole("flashinfer.mamba").selective_state_update


# ---- prefill ---------------------------------------------------------------------------------------------------------


class MambaSsmChunkScan(Peer):
    """``mamba_chunk_scan_combined``, with an initial and a final state."""

    CHUNK = 256  # as Nemotron-H configures it is 128 or 256; the larger is the faster of the two

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.prefills)
        self.scan = loader.mamba_ssm("ssd_combined").mamba_chunk_scan_combined

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def step(self, layer: int, i: int) -> Tensor:
        at = self.layers[layer]
        y, at.state = self.scan(
            at.x[i], at.dt[i], at.A[:, 0, 0].contiguous(), at.B[i], at.C[i], self.CHUNK, D=at.D[:, 0].float().contiguous(),
            dt_bias=at.dt_bias[:, 0].float().contiguous(), initial_states=self.problems[layer].state, dt_softplus=True,
            return_final_states=True,
        )  # fmt: skip
        return y.flatten(2)


PEERS: dict[str, type[Peer]] = {
    "mamba_ssm": MambaSsmStandard,
    "vllm": VllmStandard,
    "sglang": SglangStandard,
    "flashinfer": FlashinferStandard,
    "vllm replay": VllmReplay,
    "flashinfer replay": FlashinferReplay,
    "sglang snapshots": SglangSnapshots,
    "flashinfer snapshots": FlashinferSnapshots,
    "mamba_ssm chunk scan": MambaSsmChunkScan,
}
