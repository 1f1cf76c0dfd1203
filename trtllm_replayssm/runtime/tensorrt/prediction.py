"""The prediction head of an engine of plans, which is a plan of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import Cursor, RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.prediction import Predicted
from trtllm_replayssm.runtime.staging import Staging
from trtllm_replayssm.runtime.step_input import StepInput
from trtllm_replayssm.runtime.tensorrt.engine import TensorRTEngine
from trtllm_replayssm.runtime.tensorrt.models import HEAD
from trtllm_replayssm.runtime.tensorrt.steps import PlanSteps


class PlanPrediction:
    """Has cursors of its own, which say where a row's tokens go: the head has no recurrent state, and nothing to roll back."""

    def __init__(
        self, engine: Engine, cursors: Tensor, pools: Mapping[str, Tensor], staging: Staging, graphs: bool
    ) -> None:
        assert isinstance(engine, TensorRTEngine)
        self.cursors, self.staging = torch.zeros_like(cursors), staging
        self.steps = PlanSteps(engine, self.cursors, pools, staging, graphs, HEAD)

    @torch.no_grad()
    def run(
        self, first_slot: int, token_ids: Tensor, starts: list[int], lengths: list[int], hidden: Tensor
    ) -> Predicted:
        """See runtime.prediction.Prediction."""
        rows, count = len(token_ids), torch.tensor(lengths, dtype=torch.int32)
        here = slice(first_slot, first_slot + rows)
        (where,) = self.staging.send(torch.tensor(starts, dtype=torch.int32))
        self.cursors[here, Cursor.COMMITTED] = self.cursors[here, Cursor.FOLDED] = where
        modes = torch.full((rows,), int(RowMode.ABSORB), dtype=torch.int32)
        given = StepInput(token_ids, count.clamp(min=1), modes, count > 0)
        out, logits = self.steps.run(given, first_slot, 0, last_only=True, previous=hidden)
        return Predicted(out[torch.arange(rows), (count - 1).clamp(min=0)], logits[:, 0])
