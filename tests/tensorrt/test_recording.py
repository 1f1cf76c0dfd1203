"""The network definition that needs no TensorRT says of a model what TensorRT says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import MAX_SEQ_LEN, REPLAY, Emission, make_weights, rtx, step_model, without
from test_emission import DECODER, LAYERS

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.tensorrt.build import EmittedStep, emit_step
from trtllm_replayssm.network.tensorrt.describe import describe_network, describe_tensors
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins, PluginLayer
from trtllm_replayssm.network.tensorrt.recording import (
    RecordedPlugins,
    broadcast,
    recorded_network,
    recording_tensorrt,
    reshaped,
)


def record(
    decoder: HybridDecoder,
    weights: dict[str, torch.Tensor],
    plugins: PluginLayer,
    dtype: torch.dtype = torch.float32,
    capability: tuple[int, int] | None = None,
    tp_size: int = 1,
    **features: bool,
) -> EmittedStep:
    tensorrt = without(recording_tensorrt(), **features)
    model = step_model(decoder, StateOptions(REPLAY, dtype, MAX_SEQ_LEN))
    return emit_step(tensorrt, recorded_network(tensorrt), model, weights, plugins, tp_size, capability)


def tables(step: EmittedStep) -> tuple[list[Any], list[Any], list[str]]:
    """Parts, tensors, and the names by which a refit finds the weights."""
    return describe_network(step), describe_tensors(step), list(step.emitter.named_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_kind_is_recorded_as_tensorrt_describes_it(dtype: torch.dtype) -> None:
    weights = make_weights(DECODER, dtype)
    genuine = Emission.of(DECODER, dtype, weights=weights)
    assert tables(record(DECODER, weights, CutPlugins(), dtype)) == tables(genuine.step)


def test_native_experts_and_collectives_are_recorded_as_tensorrt_describes_them() -> None:
    moe = HybridDecoder(50, 32, 1e-5, (LAYERS["moe by softmax, gated shared expert"],))
    weights = make_weights(moe, torch.bfloat16)
    genuine = Emission.of(moe, torch.bfloat16, weights=weights, capability=(10, 0))
    assert tables(record(moe, weights, CutPlugins(), torch.bfloat16, (10, 0))) == tables(genuine.step)
    half = DECODER.divided(2)
    weights = make_weights(half, torch.float32)
    genuine = Emission.of(half, weights=weights, tp_size=2)
    assert tables(record(half, weights, CutPlugins(), tp_size=2)) == tables(genuine.step)


def test_earlier_versions_are_recorded_as_tensorrt_describes_them() -> None:
    weights = make_weights(DECODER, torch.float32)
    missing = {"kv_cache_update": False, "attention_lengths": False}
    genuine = Emission.of(DECODER, weights=weights, tensorrt=without(rtx(), **missing))
    recorded = record(DECODER, weights, CutPlugins(), **missing)
    assert tables(recorded) == tables(genuine.step)


def test_plugin_layers_are_layers_of_the_network() -> None:
    step = record(DECODER, make_weights(DECODER, torch.float32), RecordedPlugins())
    rows = {row.scope: row for row in describe_network(step)}
    assert rows["step"].plugins == ["replayssm::advance"]
    assert rows["transformer.layers.0.mamba2"].plugins == ["replayssm::causal_conv", "replayssm::mamba2"]
    assert step.tensors()["cursors_out"] == ("out", torch.int32, (-1, 64))
    assert not any("cut/" in name for name in step.tensors())


def test_shapes_that_do_not_fit_are_refused() -> None:
    assert broadcast((-1, 1, 8), (1, 5, 8)) == (-1, 5, 8)
    assert reshaped((-1, -1, 64), (0, 0, 4, -1)) == (-1, -1, 4, 16)
    assert reshaped((-1, 4, -1, 8), (0, 2, -1, 8)) == (-1, 2, -1, 8)
    with pytest.raises(ValueError, match=r"shapes do not fit: \[2, 3\] and \[2, 4\]"):
        broadcast((2, 3), (2, 4))
