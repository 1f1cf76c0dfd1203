"""Weights that stay quantised as networks: they compute what their dequantised twins do, and TensorRT builds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import REPLAY, Emission, Run
from hf_models import random_ids
from test_quantised_families import folders
from test_quantised_kept import KEPT
from test_recording import record

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.network.packed import dense
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.network.tensorrt.describe import describe_network, layer_kind
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins
from trtllm_replayssm.plugins.cursors import RowMode

SIZES = StepSizes(max_batch_size=4, verify_tokens=REPLAY.verify_tokens, prefill_tokens=64)
#: A GPU that TensorRT-RTX builds for and that has numbers of 4 bits, one with 8 bits only, and one with neither.
FP4, FP8, NEITHER = (12, 0), (8, 9), (8, 6)
#: Each format, dense and with experts.
SAMPLES = ("nemotron super", "qwen3.5 moe fp8 in small blocks", "falcon nvfp4", "kimi fp8")
sample = pytest.mark.parametrize("name", SAMPLES)


def checkpoint(name: str, tmp_path: Path, dtype: str) -> tuple[CheckpointConfig, dict[str, Any]]:
    packed, _ = folders(KEPT[name], tmp_path)
    config = convert(packed, tmp_path / "kept", dtype=dtype, warn=lambda message: None, quantization="keep")
    return config, load_rank(tmp_path / "kept", 0)


def emission(config: CheckpointConfig, weights: dict[str, Any], capability: tuple[int, int]) -> Emission:
    return Emission.of(config.rank_decoder(), config.torch_dtype, weights=weights, capability=capability)


def kinds(made: Emission) -> Counter[str]:
    network = made.step.network
    return Counter(layer_kind(made.step.emitter, network.get_layer(i)) for i in range(network.num_layers))


@sample
def test_network_equals_the_dequantised_twin(name: str, tmp_path: Path) -> None:
    """Bit for bit with the same network over constants, and within rounding of the torch backend."""
    config, weights = checkpoint(name, tmp_path, "float32")
    ids, made = random_ids(2, 21, seed=2), emission(config, weights, FP4)
    expected, got = Run(made, 2).compare(ids, RowMode.ABSORB, 21)
    torch.testing.assert_close(got, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)
    values = {key: dense(weight) for key, weight in weights.items()}
    _, twin = Run(emission(config, values, FP4), 2).compare(ids, RowMode.ABSORB, 21)
    assert torch.equal(got, twin)
    each = {"FP8": 1, "NVFP4": 2}
    # The tied or unused part of an MTP head is in another plan.
    used = [p for n, p in config.packings.items() if not n.startswith("mtp.")]
    assert kinds(made)["DEQUANTIZE"] == sum(each[packing.quant_algo] for packing in used)


@sample
def test_tensorrt_builds_the_network(name: str, tmp_path: Path) -> None:
    """In bfloat16, with all profiles, for a GPU that has the numbers."""
    config, weights = checkpoint(name, tmp_path, "bfloat16")
    assert len(emission(config, weights, FP4).plan(SIZES, FP4)) > 0


def test_numbers_that_the_gpu_lacks_become_constants(tmp_path: Path) -> None:
    """FP8 stays where there is no FP4, and what TensorRT would refuse is built."""
    config, weights = checkpoint("nemotron super", tmp_path, "bfloat16")
    algorithms = Counter(p.quant_algo for n, p in config.packings.items() if not n.startswith("mtp."))
    hopper, ampere = (emission(config, weights, capability) for capability in (FP8, NEITHER))
    assert kinds(hopper)["DEQUANTIZE"] == algorithms["FP8"]
    assert kinds(ampere)["DEQUANTIZE"] == 0
    assert len(hopper.plan(SIZES, FP8)) > 0


@sample
def test_network_is_the_same_without_tensorrt(name: str, tmp_path: Path) -> None:
    """What ``build --dry_run`` shows: the bytes of the weights are those that the file has."""
    config, weights = checkpoint(name, tmp_path, "float32")
    decoder = config.rank_decoder()
    genuine, recorded = Emission.of(decoder, weights=weights).step, record(decoder, weights, CutPlugins())
    assert describe_network(recorded) == describe_network(genuine)
