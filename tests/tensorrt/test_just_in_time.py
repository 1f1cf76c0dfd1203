"""The plugin layers as Python that TensorRT calls: the kernels that are launched are those of the embedded engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lean_runtime import missing, tensorrt_bindings

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

from quick_harness import Built  # noqa: E402
from test_plugins import CASES, Case  # noqa: E402

from trtllm_replayssm.compat import TensorRT  # noqa: E402
from trtllm_replayssm.network.tensorrt.quick_plugins import QuickPlugins  # noqa: E402
from trtllm_replayssm.plugins.launch import Launch  # noqa: E402
from trtllm_replayssm.plugins.tensorrt import quick  # noqa: E402
from trtllm_replayssm.plugins.tensorrt.definitions import DEFINITIONS, Bound  # noqa: E402
from trtllm_replayssm.plugins.tensorrt.quick import register_plugins, to_plugin  # noqa: E402

ROWS, TOKENS, STREAM = 3, 4, 77


def plugin_of(case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plugin as TensorRT creates it where a network asks for Python."""
    trt = tensorrt.module
    definition = DEFINITIONS[case.layer]
    values = to_plugin(definition, case.attributes, (9, 0), False)
    fields = Built(trt, tensorrt, definition, values, monkeypatch).fields
    creator = trt.get_plugin_registry().get_creator(case.layer, "1", "replayssm")
    request = trt.QuickPluginCreationRequest.STRICT_JIT
    collection = trt.PluginFieldCollection(fields)
    return creator.create_plugin(case.layer, "replayssm", collection, trt.TensorRTPhase.RUNTIME, request)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layer)
def test_kernel_and_arguments_are_those_of_the_embedded_engine(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensorrt = TensorRT.of(tensorrt_bindings(), "tensorrt")
    register_plugins(tensorrt)
    trt, launched = tensorrt.module, []

    def launch_at(record: Launch, device: int, inputs: list[int], outputs: list[int], stream: int) -> None:
        launched.append((record, device, inputs, outputs, stream))

    monkeypatch.setattr(quick, "launch_at", launch_at)
    monkeypatch.setattr(quick.torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(logging.getLogger("trtllm_replayssm"), "propagate", True)
    plugin = plugin_of(case, tensorrt, monkeypatch)
    plugin.aliased_map, plugin._tactic = {}, TOKENS
    sizes = {"rows": ROWS, "tokens": TOKENS}

    def described(tensors: Any) -> list[Any]:
        found = []
        for dtype, shape in tensors:
            desc = trt.PluginTensorDesc()
            desc.type, desc.format = tensorrt.dtype(dtype), trt.TensorFormat.LINEAR
            desc.dims = [sizes.get(size, size) for size in shape]
            found.append(desc)
        return found

    inputs, outputs = described(case.inputs.values()), described(case.outputs)
    given, made = [256 * (i + 1) for i in range(len(inputs))], [1 << 20 | 256 * i for i in range(len(outputs))]
    strides = [()] * max(len(inputs), len(outputs))
    with caplog.at_level(logging.DEBUG, "trtllm_replayssm"):
        plugin.enqueue(inputs, outputs, given, made, strides, strides, STREAM)
    bound = {
        name: Bound(dtype, shape[-1]) for name, (dtype, shape) in case.inputs.items() if isinstance(shape[-1], int)
    }
    bound |= {name: Bound(dtype, sizes[shape[-1]]) for name, (dtype, shape) in case.inputs.items() if name not in bound}
    record = DEFINITIONS[case.layer].launch(case.attributes, bound, ROWS, TOKENS)
    assert launched == [(record, 2, given, made, STREAM)]
    assert f"tactic {TOKENS}: {record.kernel.symbol}" in caplog.text


def test_networks_ask_for_python_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt = TensorRT.of(tensorrt_bindings(), "tensorrt")
    assert QuickPlugins(tensorrt, (9, 0)).ahead_of_time
    assert not QuickPlugins(tensorrt, (9, 0), just_in_time=True).ahead_of_time
