"""``replayssm::materialise`` on the GPU."""

from __future__ import annotations

from functools import partial

import harness
import pytest
import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.materialise import materialise as device_materialise
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.delta_rule import DeltaRule
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.materialise import materialise as reference_materialise
from trtllm_replayssm.plugins.reference.replay import Recurrence

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WINDOW, RING_ROWS, SLOTS, SOURCE, DESTINATION = 16, 20, 5, 3, 1
LAYERS = {
    "mamba2": Mamba2Attributes(16, 64, 128, 2, WINDOW, RING_ROWS),
    "mamba2-odd": Mamba2Attributes(3, 24, 40, 3, WINDOW, RING_ROWS),
    "gated_delta": GatedDeltaAttributes(2, 4, 128, 128, WINDOW, RING_ROWS),
    "gated_delta-odd": GatedDeltaAttributes(1, 3, 72, 40, WINDOW, RING_ROWS),
    "gated_delta-derived": GatedDeltaAttributes(2, 4, 128, 128, WINDOW, RING_ROWS, derived_fold=True),
    "kda": KdaAttributes(4, 128, 128, WINDOW, RING_ROWS),
    "kda-wide": KdaAttributes(2, 256, 96, WINDOW, RING_ROWS),
    "kda-derived": KdaAttributes(4, 128, 128, WINDOW, RING_ROWS, derived_fold=True),
    "mamba2-nvfp4": Mamba2Attributes(16, 64, 128, 2, WINDOW, RING_ROWS, read_dtype="nvfp4"),
    "gated_delta-nvfp4": GatedDeltaAttributes(2, 4, 128, 128, WINDOW, RING_ROWS, read_dtype="nvfp4"),
    "kda-fp8": KdaAttributes(4, 96, 40, WINDOW, RING_ROWS, read_dtype="fp8"),
}


def make_entry(generator: torch.Generator, name: str, shape: tuple[int, ...]) -> Tensor:
    uniform = torch.rand(shape, generator=generator)
    scaled = {"ring_dt": 0.5 * uniform, "ring_g": -0.3 * uniform, "ring_beta": uniform}
    return scaled[name] if name in scaled else torch.randn(shape, generator=generator)


class Case:
    """Pools in which one slot is live, NaN elsewhere, and the recurrence of their layer."""

    def __init__(self, layer: str, state: torch.dtype, folded: int, history: int, ring: torch.dtype = BF16) -> None:
        self.attributes, self.folded = LAYERS[layer], folded
        generator = torch.Generator().manual_seed(folded + history)
        plans = [harness.RowPlan(SOURCE, folded + history, folded, folded, 0)]
        described = self.attributes.pools(ring, state, ring)
        self.pools = harness.poisoned_pools(described, plans, SLOTS, partial(make_entry, generator))
        heads = self.pools["state"].shape[1]
        self.A_log, self.D = (torch.randn(heads, generator=generator) for _ in range(2))

    def recurrence(self, dtype: torch.dtype, device: str = "cpu") -> Recurrence:
        if isinstance(self.attributes, Mamba2Attributes):
            return Mamba2Recurrence(self.A_log.to(device, dtype), self.D.to(device, dtype))
        return DeltaRule(self.attributes.derived_fold)

    def on_device(self, pools: dict[str, Tensor], prefix: int, destination: int = DESTINATION) -> Tensor:
        device_materialise(self.recurrence(FP32, "cuda"), pools, SOURCE, destination, self.folded, prefix)
        return pools["state"][destination]

    def compare(self, prefix: int) -> None:
        def run_reference(pools: dict[str, Tensor]) -> Tensor:
            reference_materialise(self.recurrence(torch.float64), pools, SOURCE, DESTINATION, self.folded, prefix)
            return pools["state"][DESTINATION]

        rings = {name: 0.0 for name in self.pools if name != "state"}
        harness.compare(run_reference, partial(self.on_device, prefix=prefix), self.pools, rings)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
def test_equals_the_reference(layer, state):
    """Every length of a prefix, the ring's wrap included; everything else in the pools keeps its bits."""
    for folded, history in ((0, 16), (1000, 16), (1013, 20), (7, 0)):
        case = Case(layer, state, folded, history)
        for entries in sorted({0, 1, history // 2, history}):
            if entries <= history:
                case.compare(folded + entries)


@pytest.mark.parametrize("ring", [FP16, FP32], ids=str)
@pytest.mark.parametrize("layer", ["mamba2", "gated_delta", "kda"])
def test_ring_dtypes(layer, ring):
    Case(layer, FP32, 1003, 13, ring).compare(1012)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("state", [FP32, BF16, FP16], ids=str)
def test_an_empty_ring_copies_the_checkpoint_bit_by_bit(layer, state):
    case = Case(layer, state, 40, 0)
    pools = harness.to_device(case.pools)
    case.on_device(pools, 40)
    assert torch.equal(pools["state"][DESTINATION], pools["state"][SOURCE])
    assert torch.isfinite(pools["state"][DESTINATION]).all()


@pytest.mark.parametrize("layer", ["mamba2", "gated_delta", "kda"])
def test_repeats_slots_and_graph_replay_give_the_same_bits(layer):
    case = Case(layer, FP32, 1001, 15)
    pools = harness.to_device(case.pools)
    want = case.on_device(pools, 1013).clone()
    for destination in (0, 2, 4):
        assert torch.equal(case.on_device(pools, 1013, destination), want)
    recurrence, graph = case.recurrence(FP32, "cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device_materialise(recurrence, pools, SOURCE, DESTINATION, case.folded, 1013)
    for _ in range(100):
        pools["state"][DESTINATION].fill_(float("nan"))
        graph.replay()
        assert torch.equal(pools["state"][DESTINATION], want)


def test_slots_beyond_two_billion_elements():
    case = Case("mamba2", BF16, 1001, 15)
    near = harness.to_device(case.pools)
    stride = 1 << 30
    shape = near["state"].shape
    flat = torch.empty((SLOTS - 1) * stride + near["state"][0].numel(), dtype=BF16, device="cuda")
    far = {**near, "state": flat.as_strided(shape, (stride, *near["state"].stride()[1:]))}
    far["state"].copy_(near["state"])
    assert torch.equal(case.on_device(far, 1010), case.on_device(near, 1010))


def test_what_the_checkpoint_has_passed_is_refused():
    case = Case("mamba2", FP32, 1001, 15)
    pools = harness.to_device(case.pools)
    with pytest.raises(ValueError, match="already holds 1001"):
        case.on_device(pools, 1000)
    with pytest.raises(ValueError, match="two different slots"):
        case.on_device(pools, 1010, SOURCE)
