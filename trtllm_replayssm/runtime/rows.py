"""Tokens of any set of slots as the rows of one step, which are slots without gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.session import Session


@dataclass(frozen=True)
class Rows:
    """first: slot of row 0. token_ids: int32 ``[rows, T]``. lengths: valid tokens of each row, 0 in slots of the gaps."""

    first: int
    token_ids: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, pieces: Mapping[int, Sequence[int]], width: int = 1) -> Rows:
        """The tokens by slot; T is at least ``width``."""
        slots = range(min(pieces), max(pieces) + 1)
        longest = max(width, *map(len, pieces.values()))
        rows = [[*piece, *[0] * (longest - len(piece))] for piece in (pieces.get(slot, ()) for slot in slots)]
        ids = torch.tensor(rows, dtype=torch.int32)
        return cls(slots.start, ids, [len(pieces.get(slot, ())) for slot in slots])

    def step(self, session: Session, mode: RowMode, last_only: bool = False) -> Tensor:
        """Logits of ``session.step``; rows in the gaps are not active."""
        lengths, modes = [max(1, n) for n in self.lengths], [mode] * len(self.lengths)
        return session.step(self.token_ids, self.first, lengths, modes, [n > 0 for n in self.lengths], last_only)
