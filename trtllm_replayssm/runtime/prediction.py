"""Runs of a multi-token prediction head over the slots of a session."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.steps import BoundPools


class Predicted(NamedTuple):
    """What the head says at one position, or at one of every row: hidden ``[..., hidden_size]``, logits ``[..., vocab]``."""

    hidden: Tensor
    logits: Tensor


class Prediction(Protocol):
    """Reads the tokens at positions ``starts + 1 ...`` of the slots ``first_slot ...``, one a row; caches keys and values.

    token_ids: int32 ``[rows, T]``, lengths: valid tokens of each row; rows of length 0 are left alone. hidden: ``[rows, T,
    hidden_size]``, the decoder's at ``starts ...``. Returns what the head says behind each row's last token.
    """

    def run(
        self, first_slot: int, token_ids: Tensor, starts: list[int], lengths: list[int], hidden: Tensor
    ) -> Predicted: ...


class TorchPrediction:
    """The head of an embedded engine."""

    def __init__(self, engine: Engine, pools: BoundPools) -> None:
        self.engine, self.pools = engine, pools

    @torch.no_grad()
    def run(
        self, first_slot: int, token_ids: Tensor, starts: list[int], lengths: list[int], hidden: Tensor
    ) -> Predicted:
        """See Prediction."""
        engine, decoder = self.engine, self.engine.decoder
        rows, count = len(token_ids), torch.tensor(lengths, dtype=torch.int32)
        step = torch.zeros(rows, STEP_WORDS, dtype=torch.int32)
        step[:, Step.SLOT] = torch.where(count > 0, torch.arange(rows), -1)
        step[:, Step.COMMITTED], step[:, Step.QUERY_LEN] = torch.tensor(starts), count
        kv_len = int((step[:, Step.COMMITTED] + count).max())
        net = engine.network(self.pools.of(slice(first_slot, first_slot + rows)), step.to(engine.device), kv_len)
        out = decoder.predicted(net, token_ids.to(engine.device), hidden, engine.config.replay)
        last = out[torch.arange(rows), (count - 1).clamp(min=0)]
        return Predicted(last, decoder.logits(net, last[:, None])[:, 0])
