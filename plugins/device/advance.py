"""CUDA implementation of ``replayssm::advance``; the contract is in plugins/advance.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import Kernel, Launch

BLOCK = 128


def launch_record(attributes: AdvanceAttributes, rows: int, tokens: int) -> Launch:
    # Only whether a row has one token or more matters at compile time beyond T itself, and T is small or a prefill chunk.
    defines = (("TOKENS", tokens), ("WINDOW", attributes.window), ("CURSOR_WORDS", CURSOR_WORDS))
    kernel = Kernel("advance.cu", "advance", BLOCK, defines)
    return Launch(kernel, (-(-rows // BLOCK), 1, 1), (rows,))


def advance(
    attributes: AdvanceAttributes, cursors: Tensor, slot_ids: Tensor, query_lens: Tensor, modes: Tensor, tokens: int
) -> Tensor:
    """See plugins/reference/advance.py."""
    step = torch.empty(len(slot_ids), STEP_WORDS, dtype=torch.int32, device=cursors.device)
    inputs = (cursors, slot_ids, query_lens, modes)
    launch(launch_record(attributes, len(slot_ids), tokens), inputs, (step, cursors))
    return step


def variants() -> list[Kernel]:
    return [launch_record(AdvanceAttributes(window), 1, tokens).kernel for window in (16, 32) for tokens in (1, 4)]
