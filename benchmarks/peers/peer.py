"""What the kernels of other projects have in common here: slots from 1 on, and rings with a row for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import ACTIVATION, DEVICE, Problem
from benchmarks.subject import Subject


class Peer(Subject):
    """Rows use slots from 1 on, because vLLM keeps slot 0 for rows without a request."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.shape: Any = self.case.shape
        self.slots = torch.arange(1, self.case.batch + 1, dtype=torch.int32, device=DEVICE)

    def ring(self, *shape: int, dtype: torch.dtype = ACTIVATION) -> Tensor:
        """A part of a ring for every slot."""
        return torch.zeros(self.case.batch + 1, *shape, dtype=dtype, device=DEVICE)
