"""What the kernels of other projects have in common here: slots from 1 on, and rings with a row for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import ACTIVATION, DEVICE, Problem
from benchmarks.subject import Subject, only_for


class Peer(Subject):
    """Rows use slots from 1 on, because vLLM keeps slot 0 for rows without a request."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.shape: Any = self.case.shape
        self.slots = torch.arange(1, self.case.batch + 1, dtype=torch.int32, device=DEVICE)

    def ring(self, *shape: int, dtype: torch.dtype = ACTIVATION) -> Tensor:
        """A part of a ring for every slot."""
        return torch.zeros(self.case.batch + 1, *shape, dtype=dtype, device=DEVICE)


class Snapshots(Peer):
    """Verify steps that leave the state alone and write one state a token; a commit copies the accepted one (not timed)."""

    tokens: tuple[int, ...] = (2, 4, 8)
    layers: Any

    def __init__(self, problems: Sequence[Problem]) -> None:
        case, state = problems[0].case, problems[0].state
        only_for(case.tokens in self.tokens)
        super().__init__(problems)
        shape = (case.batch, case.tokens, *state.shape[1:])
        self.saved = [torch.zeros(shape, dtype=case.state, device=DEVICE) for _ in problems]

    def bytes(self) -> float:
        return self.case.snapshot_bytes()

    def commit(self, accepted: int) -> None:
        for layer, saved in zip(self.layers, self.saved):
            layer.state[1:] = saved[:, accepted - 1]
