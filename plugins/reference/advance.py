"""Reference of ``replayssm::advance``; the contract is in plugins/advance.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Cursor, RowMode, Step


def advance(
    attributes: AdvanceAttributes, cursors: Tensor, slot_ids: Tensor, query_lens: Tensor, modes: Tensor, tokens: int
) -> Tensor:
    """Step info int32 ``[rows, STEP_WORDS]`` for a step of ``tokens`` (T) tokens a row; updates ``folded`` in place."""
    live, slots = slot_ids >= 0, slot_ids.clamp(min=0).long()
    committed, folded = cursors[slots, Cursor.COMMITTED], cursors[slots, Cursor.FOLDED]
    history = committed - folded
    absorb = modes == RowMode.ABSORB
    if tokens == 1:
        absorb = absorb | (history + 1 >= attributes.window)
    flush = (modes == RowMode.FLUSH) | (history + tokens > attributes.window)
    fold_to = torch.where(absorb, committed + query_lens, torch.where(flush, committed, folded))
    step = torch.zeros(len(slot_ids), STEP_WORDS, dtype=torch.int32, device=cursors.device)
    step[:, Step.SLOT] = slot_ids
    for column, value in (
        (Step.COMMITTED, committed),
        (Step.FOLDED, folded),
        (Step.FOLD_TO, fold_to),
        (Step.QUERY_LEN, query_lens),
        (Step.SEED, cursors[slots, Cursor.SEED]),
    ):
        step[:, column] = torch.where(live, value, 0)
    order = torch.argsort(step[:, Step.FOLD_TO] <= step[:, Step.FOLDED], stable=True)
    step[:, Step.TURN] = order - torch.arange(len(order), device=order.device)
    cursors[slots[live], Cursor.FOLDED] = fold_to[live].to(cursors.dtype)
    return step
