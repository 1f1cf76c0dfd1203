"""A network definition that only writes down its layers, for machines without TensorRT.

It has the part of TensorRT's Python API that ``emitter`` uses, and infers dtypes and shapes by TensorRT's rules, so that a
model can be emitted, shown and checked for its names and shapes anywhere. It builds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from trtllm_replayssm.compat import TYPE_NAMES, Features, TensorRT
from trtllm_replayssm.network.base import DYNAMIC
from trtllm_replayssm.network.tensorrt.emitter import Emitter
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginOutput

Shape = tuple[int, ...]
#: dtype and shape of every output of a layer.
Outputs = list[tuple[Any, Shape]]

#: What a TensorRT of today has; a dry run assumes it where none is installed.
NEWEST = Features(kv_cache_update=True, attention_lengths=True, moe=True, collective=True, plugins=True, aliases=True)


class Names:
    """An enumeration of TensorRT: every member is its own name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(name=name)


class RecordedTensor:
    """Stands for ITensor. value: its numbers, where it holds the sizes of another tensor."""

    def __init__(self, name: str, dtype: Any, shape: Shape, is_network_input: bool = False) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self.is_network_input, self.is_network_output = is_network_input, False
        self.value: Shape | None = None
        self.dimensions: dict[int, str] = {}

    def set_dimension_name(self, axis: int, name: str) -> None:
        self.dimensions[axis] = name


class RecordedLayer:
    """Stands for ILayer and its subclasses. Attributes that decide shapes are set before the first output is asked for."""

    def __init__(
        self, index: int, kind: str, inputs: Sequence[Any], infer: Callable[[Any], Outputs], **attributes: Any
    ) -> None:
        self.index, self.type, self.name = index, SimpleNamespace(name=kind), ""
        self.inputs, self.infer = list(inputs), infer
        self.outputs: list[RecordedTensor] | None = None
        vars(self).update(attributes)

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.made())

    def get_input(self, place: int) -> RecordedTensor | None:
        return self.inputs[place]

    def set_input(self, place: int, tensor: RecordedTensor) -> None:
        self.inputs += [None] * (place + 1 - len(self.inputs))
        self.inputs[place] = tensor

    def set_gated_weights(self, *weights_and_activation: Any) -> None:
        *weights, self.activation = weights_and_activation
        self.inputs += weights

    def made(self) -> list[RecordedTensor]:
        if self.outputs is None:
            inferred = self.infer(self)
            self.outputs = [
                RecordedTensor(f"layer {self.index} output {i}", *output) for i, output in enumerate(inferred)
            ]
        return self.outputs

    def get_output(self, place: int) -> RecordedTensor:
        return self.made()[place]


class RecordedAttention(RecordedLayer):
    """Stands for IAttention, which TensorRT lists as two layers; this is the second, and names both."""

    def __init__(self, first: RecordedLayer) -> None:
        self.first = first
        self.mask = self.key_value_lengths = None
        self.decomposable = False
        (inner,) = first.made()
        super().__init__(first.index + 1, "ATTENTION_OUTPUT", (inner,), lambda _: [(inner.dtype, inner.shape)])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "name":
            self.first.name = value


class RecordedNetwork:
    """Stands for INetworkDefinition."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.layers: list[RecordedLayer] = []
        self.network_inputs: list[RecordedTensor] = []
        self.network_outputs: list[RecordedTensor] = []

    num_layers = property(lambda self: len(self.layers))
    num_inputs = property(lambda self: len(self.network_inputs))
    num_outputs = property(lambda self: len(self.network_outputs))

    def get_layer(self, place: int) -> RecordedLayer:
        return self.layers[place]

    def get_input(self, place: int) -> RecordedTensor:
        return self.network_inputs[place]

    def get_output(self, place: int) -> RecordedTensor:
        return self.network_outputs[place]

    def add(self, kind: str, inputs: Sequence[Any], infer: Callable[[Any], Outputs], **attributes: Any) -> Any:
        self.layers.append(RecordedLayer(self.num_layers, kind, inputs, infer, **attributes))
        return self.layers[-1]

    def same(self, kind: str, inputs: Sequence[Any], **attributes: Any) -> Any:
        """A layer whose one output is like its first input."""
        return self.add(kind, inputs, lambda _: [(inputs[0].dtype, inputs[0].shape)], **attributes)

    def add_input(self, name: str, dtype: Any, shape: Shape) -> RecordedTensor:
        self.network_inputs.append(RecordedTensor(name, dtype, tuple(shape), is_network_input=True))
        return self.network_inputs[-1]

    def set_weights_name(self, weights: Any, name: str) -> bool:
        return True

    def mark_output(self, tensor: RecordedTensor) -> None:
        tensor.is_network_output = True
        self.network_outputs.append(tensor)

    # ---- layers, in the order of emitter.py --------------------------------------------------------------------------

    def add_constant(self, shape: Shape, weights: Any) -> Any:
        return self.add("CONSTANT", (), lambda _: [(weights.dtype, tuple(shape))], weights=weights)

    def add_fill(self, shape: Shape, operation: Any, dtype: Any) -> Any:
        return self.add("FILL", (), lambda _: [(dtype, (DYNAMIC,))], operation=operation)

    def add_cast(self, x: Any, dtype: Any) -> Any:
        return self.add("CAST", (x,), lambda _: [(dtype, x.shape)], to_type=dtype)

    def add_dequantize(self, x: Any, scales: Any, dtype: Any) -> Any:
        return self.add("DEQUANTIZE", (x, scales), lambda _: [(dtype, x.shape)], axis=None)

    def add_quantize(self, x: Any, scale: Any, dtype: Any) -> Any:
        return self.add("QUANTIZE", (x, scale), lambda _: [(dtype, x.shape)])

    def add_dynamic_quantize(self, x: Any, axis: int, block: int, dtype: Any, scale_dtype: Any) -> Any:
        scales = tuple(size // block if place == axis else size for place, size in enumerate(x.shape))
        return self.add("DYNAMIC_QUANTIZE", (x,), lambda _: [(dtype, x.shape), (scale_dtype, scales)])

    def add_elementwise(self, a: Any, b: Any, op: Any) -> Any:
        dtype = self.module.bool if op.name in ("EQUAL", "GREATER", "LESS") else a.dtype
        return self.add("ELEMENTWISE", (a, b), lambda _: [(dtype, broadcast(a.shape, b.shape))], op=op)

    def add_unary(self, x: Any, op: Any) -> Any:
        return self.same("UNARY", (x,), op=op)

    def add_activation(self, x: Any, activation: Any) -> Any:
        return self.same("ACTIVATION", (x,), activation=activation)

    def add_select(self, condition: Any, a: Any, b: Any) -> Any:
        shape = broadcast(condition.shape, broadcast(a.shape, b.shape))
        return self.add("SELECT", (condition, a, b), lambda _: [(a.dtype, shape)])

    def add_reduce(self, x: Any, op: Any, axes: int, keep_dims: bool) -> Any:
        shape = tuple(1 if axes >> axis & 1 else size for axis, size in enumerate(x.shape))
        return self.add("REDUCE", (x,), lambda _: [(x.dtype, shape)], op=op, axes=axes, keep_dims=keep_dims)

    def add_cumulative(self, x: Any, axis: Any, op: Any, exclusive: bool, reverse: bool) -> Any:
        return self.same("CUMULATIVE", (x, axis), op=op, exclusive=exclusive, reverse=reverse)

    def add_softmax(self, x: Any) -> Any:
        return self.same("SOFTMAX", (x,), axes=0)

    def add_topk(self, x: Any, op: Any, k: int, axes: int) -> Any:
        shape = tuple(k if axes >> axis & 1 else size for axis, size in enumerate(x.shape))
        return self.add("TOPK", (x,), lambda _: [(x.dtype, shape), (self.module.int32, shape)], op=op, k=k)

    def add_gather_v2(self, x: Any, indices: Any, mode: Any) -> Any:
        def infer(layer: Any) -> Outputs:
            if mode.name == "ELEMENT":
                return [(x.dtype, indices.shape)]
            picked = indices.shape[layer.num_elementwise_dims :]
            return [(x.dtype, (*x.shape[: layer.axis], *picked, *x.shape[layer.axis + 1 :]))]

        return self.add("GATHER", (x, indices), infer, mode=mode, axis=0, num_elementwise_dims=0)

    def add_scatter(self, x: Any, indices: Any, updates: Any, mode: Any) -> Any:
        return self.same("SCATTER", (x, indices, updates), mode=mode, axis=0)

    def add_slice(self, x: Any, start: Shape, size: Shape, stride: Shape) -> Any:
        def infer(layer: Any) -> Outputs:
            sizes = dict(zip(layer.axes, size))
            return [(x.dtype, tuple(sizes.get(axis, whole) for axis, whole in enumerate(x.shape)))]

        return self.add("SLICE", (x,), infer, start=start, shape=size, stride=stride, axes=())

    def add_concatenation(self, tensors: Sequence[Any]) -> Any:
        def infer(layer: Any) -> Outputs:
            sizes = [x.shape[layer.axis] for x in tensors]
            shape = list(tensors[0].shape)
            shape[layer.axis] = DYNAMIC if DYNAMIC in sizes else sum(sizes)
            return [(tensors[0].dtype, tuple(shape))]

        return self.add("CONCATENATION", tensors, infer, axis=0)

    def add_shuffle(self, x: Any) -> Any:
        def infer(layer: Any) -> Outputs:
            shape = tuple(x.shape[axis] for axis in layer.first_transpose or range(len(x.shape)))
            if len(layer.inputs) > 1:
                sizes = layer.inputs[1]
                return [(x.dtype, sizes.value or (DYNAMIC,) * sizes.shape[0])]
            return [(x.dtype, shape if layer.reshape_dims is None else reshaped(shape, layer.reshape_dims))]

        return self.add("SHUFFLE", (x,), infer, first_transpose=None, reshape_dims=None)

    def add_unsqueeze(self, x: Any, axes: Any) -> Any:
        # The emitter asks for a new first axis and no other.
        return self.add("UNSQUEEZE", (x, axes), lambda _: [(x.dtype, (1, *x.shape))])

    def add_shape(self, x: Any) -> Any:
        layer = self.add("SHAPE", (x,), lambda _: [(self.module.int64, (len(x.shape),))])
        layer.get_output(0).value = x.shape
        return layer

    def add_matrix_multiply(self, a: Any, op_a: Any, b: Any, op_b: Any) -> Any:
        def turned(x: Any, op: Any) -> Shape:
            return (*x.shape[:-2], x.shape[-1], x.shape[-2]) if op.name == "TRANSPOSE" else x.shape

        left, right = turned(a, op_a), turned(b, op_b)
        shape = (*broadcast(left[:-2], right[:-2]), left[-2], right[-1])
        return self.add("MATRIX_MULTIPLY", (a, b), lambda _: [(a.dtype, shape)], op0=op_a, op1=op_b)

    def add_identity(self, x: Any) -> Any:
        return self.same("IDENTITY", (x,))

    def add_kv_cache_update(self, cache: Any, update: Any, start: Any, mode: Any) -> Any:
        return self.same("KV_CACHE_UPDATE", (cache, update, start), mode=mode)

    def add_attention_v2(self, query: Any, key: Any, value: Any, normalisation: Any, causal: Any) -> Any:
        outputs = [(query.dtype, (*query.shape[:3], value.shape[3]))]
        first = self.add("ATTENTION_INPUT", (query, key, value), lambda _: outputs)
        self.layers.append(RecordedAttention(first))
        return self.layers[-1]

    def add_moe(self, x: Any, indices: Any, weights: Any) -> Any:
        return self.same("MOE", (x, indices, weights))

    def add_dist_collective(self, x: Any, operation: Any, reduction: Any, root: int, groups: Sequence[int]) -> Any:
        def infer(layer: Any) -> Outputs:
            gathered = (x.shape[0] * layer.num_ranks, *x.shape[1:])
            return [(x.dtype, gathered if operation.name == "ALL_GATHER" else x.shape)]

        return self.add("DIST_COLLECTIVE", (x,), infer, operation=operation, reduction=reduction, num_ranks=1)


class RecordedPlugins:
    """Adds plugin layers (plugin_layer.PluginLayer) to a RecordedNetwork."""

    with_advance = True

    def __call__(
        self,
        emitter: Emitter,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Any],
        outputs: tuple[PluginOutput, ...],
    ) -> tuple[Any, ...]:
        described = [(emitter.tensorrt.dtype(output.dtype), output.shape) for output in outputs]
        layer = emitter.network.add("PLUGIN_V3", tuple(inputs.values()), lambda _: described, attributes=attributes)
        emitter.named(layer, kind, *inputs.values())
        return tuple(layer.get_output(place) for place in range(len(outputs)))


def recording_tensorrt(features: Features = NEWEST) -> TensorRT:
    """Something that looks like an installed TensorRT with these features. Its networks are RecordedNetworks."""
    enumerations = (
        "ActivationType",
        "AttentionNormalizationOp",
        "CausalMaskKind",
        "CollectiveOperation",
        "CumulativeOperation",
        "ElementWiseOperation",
        "FillOperation",
        "GatherMode",
        "KVCacheMode",
        "MatrixOperation",
        "MoEActType",
        "ReduceOperation",
        "ScatterMode",
        "TopKOperation",
        "UnaryOperation",
    )
    module: Any = SimpleNamespace(**{name: Names() for name in enumerations})
    vars(module).update({name: SimpleNamespace(name=name) for name in TYPE_NAMES.values()})
    # describe reads ILayer.type as TensorRT's subclasses make necessary.
    module.ILayer = SimpleNamespace(type=SimpleNamespace(__get__=lambda layer: layer.type))
    module.Weights = lambda dtype, address, count: SimpleNamespace(dtype=dtype, address=address, count=count)
    return TensorRT(module, "recording", (), replace(features, plugins=True))


def recorded_network(tensorrt: TensorRT) -> RecordedNetwork:
    return RecordedNetwork(tensorrt.module)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def broadcast(a: Shape, b: Shape) -> Shape:
    """Sizes are equal or 1; a size that is only known later is taken to fit."""
    if len(a) != len(b):
        raise ValueError(f"ranks differ: {list(a)} and {list(b)}")
    for m, n in zip(a, b):
        if m != n and 1 not in (m, n) and DYNAMIC not in (m, n):
            raise ValueError(f"shapes do not fit: {list(a)} and {list(b)}")
    return tuple(m if n == 1 else n if m in (1, DYNAMIC) else m for m, n in zip(a, b))


def reshaped(shape: Shape, dims: Sequence[int]) -> Shape:
    """0 keeps the size of that axis, one -1 takes what is left, where that is known."""
    result = [shape[axis] if size == 0 else size for axis, size in enumerate(dims)]
    if -1 not in dims:
        return tuple(result)
    kept = [axis for axis, size in enumerate(dims) if size == 0]
    left = [size for axis, size in enumerate(shape) if axis not in kept]
    if DYNAMIC not in left:
        taken = math.prod(size for axis, size in enumerate(dims) if axis not in kept and size != -1)
        result[list(dims).index(-1)] = math.prod(left) // taken
    return tuple(result)
