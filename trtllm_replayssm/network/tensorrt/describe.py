"""A network as a table: what every layer of the model became, and the tensors of the engine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_replayssm.compat import value_count
from trtllm_replayssm.network.tensorrt.build import EmittedStep
from trtllm_replayssm.network.tensorrt.emitter import Emitter
from trtllm_replayssm.plugins import PLUGIN_NAMESPACE


@dataclass
class ScopeRow:
    """One part of the model. layers: TensorRT layers by kind, constants apart. plugins: plugin layers.

    weight_bytes: of the constants it was the first to use. output: dtype and shape of its last tensor.
    """

    scope: str
    layers: Counter[str] = field(default_factory=Counter)
    plugins: list[str] = field(default_factory=list)
    weight_bytes: int = 0
    output: str = ""


def describe_network(step: EmittedStep) -> list[ScopeRow]:
    """A row for every part of the model, in the order in which they run. Needs no GPU and no plan."""
    network, emitter = step.network, step.emitter
    rows: dict[str, ScopeRow] = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        scope, _, _ = layer.name.rpartition("/")
        row = rows.setdefault(scope, ScopeRow(scope))
        kind, output = layer_kind(emitter, layer), layer.get_output(0)
        if kind == "CONSTANT":
            dtype = emitter.dtype(output)
            row.weight_bytes += math.prod(output.shape) * dtype.itemsize // value_count(dtype, 1)
        else:
            # Plugin layers are listed below, by name and also where the network was cut at them.
            row.layers[kind] += kind != "PLUGIN_V3"
            row.output = shape_text(emitter.dtype(output), tuple(output.shape))
    for scope, kind in emitter.plugin_layers:
        rows.setdefault(scope, ScopeRow(scope)).plugins.append(f"{PLUGIN_NAMESPACE}::{kind}")
    return list(rows.values())


def layer_kind(emitter: Emitter, layer: Any) -> str:
    """TensorRT's name of a layer's type; some interfaces hide it behind a ``type`` of their own."""
    return emitter.trt.ILayer.type.__get__(layer).name


def describe_tensors(step: EmittedStep) -> list[tuple[str, str, str]]:
    """Name, direction, dtype and shape of every tensor that is bound to the engine; dynamic sizes by their symbols."""
    symbols = step.emitter.inputs
    return [
        (name, direction, shape_text(dtype, symbols.get(name, shape)))
        for name, (direction, dtype, shape) in step.tensors().items()
    ]


def shape_text(dtype: torch.dtype, shape: tuple[int | str, ...]) -> str:
    sizes = ", ".join("?" if size == -1 else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')} [{sizes}]"
