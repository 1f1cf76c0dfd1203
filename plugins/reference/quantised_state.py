"""Reference of the quantised state; formats and formulas are in plugins/quantised_state.py."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.quantised_state import LARGEST, SCALE
from trtllm_replayssm.plugins.reference.read_copy import quotient


def quantise(states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes ``[slots, H, R, C]`` and scales ``[slots, H, R]`` of states of any floating dtype."""
    x = states.float()
    scale = quotient(x.abs().amax(-1), LARGEST[dtype])
    codes = (x / torch.where(scale == 0, 1.0, scale)[..., None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (codes.round().nan_to_num(0.0) if dtype == torch.int8 else codes).to(dtype), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Values in float32."""
    return codes.float() * scale[..., None]


def stored_states(pools: dict[str, Tensor], slots: Tensor) -> Tensor:
    """The checkpoints of ``slots`` as they are stored, or their values in float32 where they are quantised."""
    state = pools["state"]
    if state.dtype not in LARGEST:
        return state[slots]
    # Eight bits are gathered and scattered as integers, which every device can.
    return dequantise(state.view(torch.int8)[slots].view(state.dtype), pools[SCALE][slots])


def store_states(pools: dict[str, Tensor], slots: Tensor, states: Tensor) -> None:
    """Write checkpoints ``[len(slots), H, R, C]`` of ``slots``, rounded to the nearest value that their dtype has."""
    state = pools["state"]
    if state.dtype not in LARGEST:
        state[slots] = states.to(state.dtype)
        return
    codes, pools[SCALE][slots] = quantise(states, state.dtype)
    state.view(torch.int8)[slots] = codes.view(torch.int8)
