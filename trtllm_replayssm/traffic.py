"""Bytes of recurrent state that a step moves: a count from cursors, and the steady state of a window.

Counted is what the plugin contracts need: the checkpoint is read once where it holds something, live ring rows are read
once, appended rows and a folded checkpoint are written once. With a read copy (plugins/read_copy.py) steps read the copy
instead; those that fold read the checkpoint besides, and write both. Left out is what any engine moves alike: activations, the
convolution window, weights and KV cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode, Step
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class RecurrentBytes:
    """Of one request: bytes of its checkpoints, of one ring row (one token) and of read copies, added up over layers."""

    state: int
    ring_row: int
    copy: int = 0

    @classmethod
    def of(cls, pools: Iterable[Pool], replay: ReplayConfig) -> RecurrentBytes:
        total = Counter[str]()
        for pool in pools:
            total[pool.kind] += math.prod(pool.shape) * pool.dtype.itemsize
        return cls(total["state"], total["ring"] // replay.ring_rows, total["copy"])

    def moved(self, step: torch.Tensor) -> int:
        """Bytes that the rows of a decode or verify step read and write. step: int32 ``[rows, STEP_WORDS]`` of ``advance``."""
        total = 0
        for row in step.tolist():
            committed, folded, fold_to = row[Step.COMMITTED], row[Step.FOLDED], row[Step.FOLD_TO]
            if row[Step.SLOT] < 0:
                continue
            holds, folds = folded > 0, fold_to > folded
            appended = row[Step.QUERY_LEN] if fold_to <= committed else 0
            if self.copy:
                total += (holds + folds) * self.copy + folds * (holds + 1) * self.state
            else:
                total += (holds + folds) * self.state
            total += (committed - folded + appended) * self.ring_row
        return total

    def steady(self, replay: ReplayConfig, tokens: int = 1, accepted: int = 1) -> float:
        """Mean bytes of a step that brings ``tokens`` tokens, ``accepted`` of them kept, over one window.

        The cursors are moved by the real ``advance`` from one fold to the next.
        """
        cursors = torch.zeros(1, CURSOR_WORDS, dtype=torch.int32)
        cursors[0, [Cursor.COMMITTED, Cursor.FOLDED]] = 1
        slot, lens, modes = torch.tensor([0]), torch.tensor([tokens]), torch.tensor([int(RowMode.DECODE)])
        moved: list[int] = []
        folds = 0
        while folds < 2:
            step = advance(AdvanceAttributes(replay.window), cursors, slot, lens, modes, tokens)
            cursors[0, Cursor.COMMITTED] += accepted
            if folds:
                moved.append(self.moved(step))
            folds += bool(step[0, Step.FOLD_TO] > step[0, Step.FOLDED])
        return sum(moved) / len(moved)

    def standard(self) -> int:
        """Bytes of an ordinary decode step: the state is read and written."""
        return 2 * self.state

    def state_per_draft(self, tokens: int) -> int:
        """Bytes of a verify step that keeps rollback points: the state is read once, and written after every token."""
        return (1 + tokens) * self.state
