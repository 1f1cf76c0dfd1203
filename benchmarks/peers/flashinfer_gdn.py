"""Gated delta rule kernels of FlashInfer, written in the CuTe DSL, which compiles them in seconds at their first call.

States are ``[slots, value heads, V, K]`` like ours, of heads of 128 x 128, and updated in place; gates go in raw. The number
of states of a batch decides which kernels run, and with which tiles, so checks have as many rows as may change that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, DeltaModel
from benchmarks.peers import delta_rule, loader, peer
from benchmarks.problem import DEVICE, Problem
from benchmarks.subject import Ringed, only_for

DIM = 128
#: States (rows times value heads) beyond which the choice of kernel and tiles stays the same.
STATES_THAT_CHOOSE = 1024


def module(name: str) -> Any:
    """A module of FlashInfer. Raises Unavailable without the CuTe DSL, of which only a call to a kernel would tell."""
    loader.whole("cutlass.cute")
    return loader.whole(f"flashinfer.{name}")


class Peer(delta_rule.Peer):
    tokens: tuple[int, ...]
    states: tuple[torch.dtype, ...]

    def __init__(self, problems: Sequence[Problem]) -> None:
        case, shape = problems[0].case, problems[0].case.shape
        only_for(isinstance(shape, DeltaModel) and not shape.per_channel and shape.dim == DIM)
        only_for(case.tokens in self.tokens and case.state in self.states)
        super().__init__(problems)

    @classmethod
    def checked_rows(cls, case: Case) -> int:
        assert isinstance(case.shape, DeltaModel)
        return min(case.batch, STATES_THAT_CHOOSE // case.shape.value_heads + 1)


class Decode(Peer):
    """``gated_delta_rule_decode_pretranspose``: the ordinary recurrence; also the verify steps below."""

    tokens: tuple[int, ...] = (1,)
    states = (torch.float32, torch.bfloat16)

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.update = module("gdn_decode").gated_delta_rule_decode_pretranspose

    def bytes(self) -> float:
        return self.case.standard_bytes()

    def step(self, layer: int, i: int) -> Tensor:
        return self.call(layer, i)

    def call(self, layer: int, i: int, **more: Any) -> Tensor:
        at = self.layers[layer]
        self.update(
            at.q[i], at.k[i], at.v[i], None, at.A_log, at.a[i], at.dt_bias, at.b[i], at.scale, at.out, use_qk_l2norm=True,
            initial_state=at.state, initial_state_indices=self.slots, backend="flashinfer", **more,
        )  # fmt: skip
        return at.out.flatten(2)


class Snapshots(peer.Snapshots, Decode):
    def step(self, layer: int, i: int) -> Tensor:
        return self.call(layer, i, intermediate_states_buffer=self.saved[layer], disable_state_update=True)


class Replay(Ringed, Peer):
    """``gated_delta_rule_mtp_ucache_flush``: a step that might not leave room folds the rows before it.

    The ring keeps normalised keys, what the delta rule adds to the state, and sums of log decays since the last fold.
    """

    tokens = (4, 8)
    states = (torch.bfloat16, torch.float16)
    #: Slots of a ring, and how many of them may be filled before a step.
    SLOTS, WINDOW = 32, 16

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        only_for(self.case.window <= self.WINDOW)
        self.run = replay_module(self.case.state).gated_delta_rule_mtp_ucache_flush
        heads, keys = self.shape.value_heads, self.shape.key_heads
        self.rings = [
            {
                "k_cache": self.ring(keys, self.SLOTS, DIM),
                "u_cache": self.ring(heads, self.SLOTS, DIM),
                "g_cache": self.ring(heads, self.SLOTS, dtype=torch.float32),
            }
            for _ in problems
        ]
        # Float32 weights would be converted at every call; these have the same values.
        self.weights = [[weight.bfloat16() for weight in problem.weights] for problem in problems]
        self.held, self.start = (torch.zeros(self.case.batch, dtype=torch.int32, device=DEVICE) for _ in range(2))
        self.first = 0

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        self.held.copy_(self.per_row(histories))
        self.start.fill_(self.first)

    def commit(self, accepted: int) -> None:
        held = self.histories[0]
        folds = self.case.folds(held)
        self.first = (self.first + held * folds) % self.SLOTS
        self.place([accepted if folds else held + accepted])

    def step(self, layer: int, i: int) -> Tensor:
        at, (A_log, dt_bias) = self.layers[layer], self.weights[layer]
        self.run(
            A_log, at.a[i], dt_bias, q=at.q[i], k=at.k[i], v=at.v[i], b=at.b[i], initial_state_source=at.state,
            initial_state_indices=self.slots, scale=at.scale, output=at.out, **self.rings[layer], hist_len=self.held,
            cache_base=self.start, flush_min=self.case.window - self.case.tokens + 1, restart_hist_on_flush=False,
            backend="hmma",
        )  # fmt: skip
        return at.out.flatten(2)


@cache
def replay_module(state: torch.dtype) -> Any:
    """The module of ``Replay``, which reads the dtype of states from the environment once: one is imported for each."""
    found = module("gdn_kernels.gdn_decode_bf16_wy_ucache_flush")
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[state]
    os.environ["GDN_UCACHE_STATE_DTYPE"] = name
    spec = importlib.util.spec_from_file_location(f"{found.__name__}_{name}", found.__file__)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    return imported


PEERS: dict[str, type[Peer]] = {
    "flashinfer": Decode,
    "flashinfer replay": Replay,
    "flashinfer snapshots": Snapshots,
}
