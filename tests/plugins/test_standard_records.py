"""Which steps the kernels of the ordinary recurrence serve, and how they and prefills are launched. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trtllm_replayssm.plugins.device import delta_rule, gated_delta, kda, mamba2
from trtllm_replayssm.plugins.device.standard import warp_rows
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import Launch
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import copy_names

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = {
    "mamba2": Mamba2Attributes(64, 64, 128, 8, 1, 1),
    "gated_delta": GatedDeltaAttributes(16, 32, 128, 128, 1, 1),
    "kda": KdaAttributes(32, 128, 128, 1, 1),
}


def record(a, rows: int = 3, tokens: int = 1, state: torch.dtype = FP32) -> Launch:
    """The launch of a layer's step whose strides are all aligned."""
    copies = len(copy_names(a.read_dtype))
    if isinstance(a, Mamba2Attributes):
        return mamba2.launch_record(a, BF16, state, BF16, rows, tokens, (8,) * (6 + copies))
    shape = gated_delta.shape_of(a) if isinstance(a, GatedDeltaAttributes) else kda.shape_of(a)
    return delta_rule.launch_record(shape, BF16, state, BF16, rows, tokens, (8,) * (8 + copies))


def is_plain(launch: Launch) -> bool:
    return launch.kernel.symbol in ("mamba2_standard", "delta_standard")


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_window_of_one_is_the_ordinary_recurrence(layer, state):
    launch = record(LAYERS[layer], state=state)
    assert is_plain(launch)
    heads, dims = (64, (64, 128)) if layer == "mamba2" else (32, (128, 128))
    warps = launch.kernel.block // 32 * launch.grid[0]
    assert launch.grid[1:] == (3, 1) and warps * warp_rows(dims, state) == heads * dims[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_whatever_needs_a_ring_or_a_copy_has_another_kernel(layer):
    a = LAYERS[layer]
    others = [replace(a, window=16, ring_rows=16), replace(a, ring_rows=5), replace(a, read_dtype="fp8")]
    assert not any(is_plain(record(other)) for other in others)
    assert not is_plain(record(a, tokens=40))


@pytest.mark.parametrize(
    ("dims", "state", "rows"),
    [((64, 128), FP32, 8), ((64, 128), BF16, 8), ((64, 256), FP32, 4), ((80, 128), BF16, 8), ((48, 40), FP32, 0)],
    ids=str,
)
def test_rows_of_a_warp(dims, state, rows):
    """32 registers of a lane hold a float32 state, 16 a narrower one; rows that do not divide have no such kernel."""
    assert warp_rows(dims, state) == rows


def test_prefills_of_few_rows_have_more_registers():
    a = replace(LAYERS["mamba2"], window=16, ring_rows=16)
    few, many = (dict(record(a, rows, 2048).kernel.defines)["BLOCKS_AN_SM"] for rows in (1, 8))
    assert (few, many) == (2, 3)
