"""Plugin layers of a network as plugins of ``tensorrt.plugin``, compiled into the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginOutput
from trtllm_replayssm.plugins.compiler import architecture
from trtllm_replayssm.plugins.tensorrt.definitions import DEFINITIONS, layer_name
from trtllm_replayssm.plugins.tensorrt.quick import register_plugins, to_plugin


class QuickPlugins:
    """Adds plugin layers (plugin_layer.PluginLayer) for GPUs of one compute capability.

    aliased: declare every pool as one memory, in and out, instead of leaving it to the caller to bind both names to one
    address. just_in_time: let TensorRT call Python at every step instead of storing the kernels in the engine; for debugging.

    Raises EngineError when this TensorRT has no such plugins, or when the kernels do not run on such a GPU.
    """

    with_advance = True

    def __init__(
        self,
        tensorrt: TensorRT,
        capability: tuple[int, int],
        aliased: bool = False,
        just_in_time: bool = False,
    ) -> None:
        architecture(*capability)
        self.capability, self.aliased, self.ahead_of_time = capability, aliased, not just_in_time
        self.layers = register_plugins(tensorrt)

    def __call__(
        self,
        emitter: Emitter,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Tensor],
        outputs: tuple[PluginOutput, ...],
    ) -> tuple[Tensor, ...]:
        if kind == "causal_conv" and "bias" not in inputs:
            kind, inputs = "causal_conv_without_bias", {**inputs, "no_bias": inputs["weight"]}
        definition = DEFINITIONS[layer_name(kind, attributes)]
        ordered = [inputs[name] for name in definition.inputs]
        made = getattr(self.layers, definition.name)(
            *ordered, **to_plugin(definition, attributes, self.capability, self.aliased)
        )
        layer = emitter.named(emitter.network.add_plugin(made, self.ahead_of_time), kind, *ordered)
        return tuple(layer.get_output(place) for place in range(len(outputs)))
