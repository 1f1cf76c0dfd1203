"""CUDA implementation of ``replayssm::advance``; the contract is in plugins/advance.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import Kernel, Launch

THREADS = 256


def launch_record(attributes: AdvanceAttributes, rows: int, tokens: int) -> Launch:
    defines = (("WINDOW", attributes.window), ("CURSOR_WORDS", CURSOR_WORDS), ("THREADS", THREADS))
    return Launch(Kernel("advance.cu", "advance", THREADS, defines), (1, 1, 1), (rows, tokens))


def advance(
    attributes: AdvanceAttributes, cursors: Tensor, slot_ids: Tensor, query_lens: Tensor, modes: Tensor, tokens: int
) -> Tensor:
    """See plugins/reference/advance.py."""
    step = torch.empty(len(slot_ids), STEP_WORDS, dtype=torch.int32, device=cursors.device)
    inputs = (cursors, slot_ids, query_lens, modes, None)
    launch(launch_record(attributes, len(slot_ids), tokens), inputs, (step, cursors))
    return step


def variants() -> list[Kernel]:
    return [launch_record(AdvanceAttributes(window), 1, 1).kernel for window in (16, 32)]
