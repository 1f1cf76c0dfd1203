"""A network definition as an ONNX file, to look at with Netron or any other viewer of ONNX.

The nodes are TensorRT's layers, in a domain of their own: the file shows the network, and cannot be run. Weights are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any

import torch

from trtllm_replayssm.errors import UserError, pip_extra
from trtllm_replayssm.network.tensorrt.build import EmittedStep
from trtllm_replayssm.network.tensorrt.describe import layer_kind

#: Domain of the operators in the file.
DOMAIN = "tensorrt"
#: ONNX's names of element types.
TYPE_NAMES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.int8: "INT8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "FLOAT8E4M3FN",
    torch.float4_e2m1fn_x2: "FLOAT4E2M1",
}


def to_onnx(step: EmittedStep, name: str) -> bytes:
    """The network ``name`` as a serialised ONNX model. Raises UserError when the package onnx is not installed."""
    try:
        import onnx
    except ImportError:
        raise UserError(
            "networks are written as ONNX, and the package onnx is not installed", pip_extra("onnx")
        ) from None
    network, emitter = step.network, step.emitter

    def described(tensor: Any) -> Any:
        kind = getattr(onnx.TensorProto, TYPE_NAMES[emitter.dtype(tensor)])
        symbols = emitter.inputs.get(tensor.name, tuple(tensor.shape))
        sizes = [size if isinstance(size, str) or size >= 0 else None for size in symbols]
        return onnx.helper.make_tensor_value_info(tensor.name, kind, sizes)

    inputs = [network.get_input(place) for place in range(network.num_inputs)]
    outputs = [network.get_output(place) for place in range(network.num_outputs)]
    bound = {tensor.name for tensor in (*inputs, *outputs)}
    nodes, between = [], []
    for layer in in_order(network):
        made = [layer.get_output(place) for place in range(layer.num_outputs)]
        read = [layer.get_input(place) for place in range(layer.num_inputs)]
        names = [tensor.name if tensor is not None else "" for tensor in read]
        kind = layer_kind(emitter, layer)
        nodes.append(onnx.helper.make_node(kind, names, [t.name for t in made], name=layer.name, domain=DOMAIN))
        between += [described(tensor) for tensor in made if tensor.name not in bound]
    graph = onnx.helper.make_graph(
        nodes, name, [*map(described, inputs)], [*map(described, outputs)], value_info=between
    )
    opsets = [onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, producer_name="trtllm_replayssm")
    return model.SerializeToString()


def in_order(network: Any) -> Iterator[Any]:
    """The layers, each behind those whose outputs it reads; ONNX wants that, TensorRT does not."""
    layers = [network.get_layer(place) for place in range(network.num_layers)]
    producers = {
        layer.get_output(i).name: place for place, layer in enumerate(layers) for i in range(layer.num_outputs)
    }
    graph: dict[int, list[int]] = {}
    for place, layer in enumerate(layers):
        read = [layer.get_input(i) for i in range(layer.num_inputs)]
        graph[place] = [producers[tensor.name] for tensor in read if tensor is not None and tensor.name in producers]
    for place in TopologicalSorter(graph).static_order():
        yield layers[place]
