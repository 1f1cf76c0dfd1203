"""Reference of ``replayssm::materialise``; the contract is in plugins/materialise.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.materialise import check_prefix
from trtllm_replayssm.plugins.quantised_state import SCALE
from trtllm_replayssm.plugins.reference.quantised_state import store_states
from trtllm_replayssm.plugins.reference.read_copy import write_copy
from trtllm_replayssm.plugins.reference.replay import Recurrence, replay_history


def materialise(
    recurrence: Recurrence, pools: dict[str, Tensor], source: int, destination: int, folded: int, prefix_len: int
) -> None:
    """Write the state after ``prefix_len`` tokens of slot ``source``, and its read copy, into slot ``destination``.

    folded: tokens in the source's checkpoint; ``folded <= prefix_len <= committed``.
    Raises ValueError when the slots are the same or the prefix is already folded away.
    """
    check_prefix(source, destination, folded, prefix_len)
    state = pools["state"]
    slots, start, until = (torch.tensor([value], device=state.device) for value in (source, folded, prefix_len))
    written = torch.tensor([destination], device=state.device)
    if prefix_len == folded > 0:
        for name in {"state", SCALE} & pools.keys():
            pools[name][destination] = pools[name][source]
    else:
        store_states(pools, written, replay_history(recurrence, pools, slots, start, until))
    write_copy(pools, written)
