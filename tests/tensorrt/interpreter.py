"""Computes a TensorRT network definition with torch, layer by layer, from what TensorRT itself says of each layer.

TensorRT's builder needs no GPU, its engines do. This reads the genuine ``INetworkDefinition``, after every emitted layer
has gone through TensorRT's own checks, so a network can be held against the torch backend on any machine. The meanings are
those of TensorRT's documentation; the network knows nothing of the op vocabulary it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from quantisers import E2M1
from torch import Tensor

from trtllm_replayssm.compat import TensorRT

#: Interface of each layer type, where the name is not that of the type.
INTERFACES = {
    "SHUFFLE": "IShuffleLayer",
    "CONSTANT": "IConstantLayer",
    "QUANTIZE": "IQuantizeLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "SLICE": "ISliceLayer",
    "REDUCE": "IReduceLayer",
    "GATHER": "IGatherLayer",
    "UNARY": "IUnaryLayer",
    "IDENTITY": "IIdentityLayer",
    "ACTIVATION": "IActivationLayer",
    "FILL": "IFillLayer",
    "CONCATENATION": "IConcatenationLayer",
    "CAST": "ICastLayer",
    "SHAPE": "IShapeLayer",
    "CUMULATIVE": "ICumulativeLayer",
    "TOPK": "ITopKLayer",
    "SELECT": "ISelectLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer",
    "SCATTER": "IScatterLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "UNSQUEEZE": "IUnsqueezeLayer",
    "MOE": "IMoELayer",
}
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "EQUAL": torch.eq,
    "GREATER": torch.gt,
    "AND": torch.logical_and,
    "LESS": torch.lt,
    "OR": torch.logical_or,
    "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}
UNARY = {"SQRT": torch.sqrt, "NOT": torch.logical_not, "ABS": torch.abs, "SIGN": torch.sign}
ACTIVATIONS = {"RELU": torch.relu, "SIGMOID": torch.sigmoid, "TANH": torch.tanh}


def e2m1_values(packed: Tensor) -> Tensor:
    """float32 of E2M1 numbers, two a byte, the first in the low nibble."""
    codes = packed.view(torch.uint8).flatten().tolist()
    return torch.tensor([E2M1[code] for byte in codes for code in (byte & 15, byte >> 4)])


def nearest_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 number of each element, the one with the even code of two as near; 6 at most."""
    sizes = torch.tensor(E2M1[:8])
    distance = (x.abs().clamp(max=6)[..., None] - sizes).abs()
    # Even codes first: argmin takes the first of equals.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return sizes[order[distance[..., order].argmin(-1)]].copysign(x)


def axis_of(mask: int) -> int:
    """The one axis of a bit mask."""
    assert mask.bit_count() == 1
    return mask.bit_length() - 1


class Interpreter:
    """One network. resolve: computes an input that is not fed (what a plugin layer makes), by name.

    exchange: hands in one rank's tensor and returns those of all ranks, for collectives. memory: behind constants of dtypes
    that numpy does not have, by name of their output; TensorRT does not show it. Values of E2M1 are held in float32.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        network: Any,
        resolve: Callable[[Interpreter, str], Tensor] | None = None,
        exchange: Callable[[Tensor], list[Tensor]] | None = None,
        memory: Mapping[str, Tensor] | None = None,
    ):
        self.tensorrt, self.trt, self.network, self.resolve = tensorrt, tensorrt.module, network, resolve
        self.exchange, self.memory = exchange, memory or {}
        self.values: dict[str, Tensor] = {}
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        self.producers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs for these inputs. Every value is checked against the dtype and shape that TensorRT inferred."""
        self.values = dict(feeds)
        for layer in self.producers.values():
            self.compute(layer)
        return {t.name: self.value(t.name) for t in map(self.network.get_output, range(self.network.num_outputs))}

    def compute(self, layer: Any) -> None:
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        if outputs[0].name in self.values:
            return
        # The interfaces of some layers have a ``type`` of their own.
        kind = self.trt.ILayer.type.__get__(layer).name
        if kind in INTERFACES:
            layer.__class__ = getattr(self.trt, INTERFACES[kind])
        results = getattr(self, kind.lower())(layer)
        for tensor, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
            self.check(layer, tensor, result)
            self.values[tensor.name] = result

    def check(self, layer: Any, tensor: Any, value: Tensor) -> None:
        declared = tuple(tensor.shape)
        assert len(declared) == value.ndim, (layer.name, declared, value.shape)
        assert all(d in (-1, n) for d, n in zip(declared, value.shape)), (layer.name, declared, value.shape)
        expected = self.tensorrt.torch_dtype(tensor.dtype)
        expected = torch.float32 if expected == torch.float4_e2m1fn_x2 else expected
        assert expected == value.dtype, (layer.name, tensor.dtype, value.dtype)

    def value(self, name: str) -> Tensor:
        if name in self.producers:
            self.compute(self.producers[name])
        elif name not in self.values:
            assert self.resolve is not None, f"{name} is not fed"
            self.values[name] = self.resolve(self, name)
        return self.values[name]

    def input(self, layer: Any, place: int) -> Tensor | None:
        tensor = layer.get_input(place) if place < layer.num_inputs else None
        return None if tensor is None else self.value(tensor.name)

    def inputs(self, layer: Any) -> list[Tensor]:
        return [self.value(layer.get_input(i).name) for i in range(layer.num_inputs)]

    # ---- layers ------------------------------------------------------------------------------------------------------

    def constant(self, layer: Any) -> Tensor:
        weights = layer.weights
        if not isinstance(weights, np.ndarray):
            memory = self.memory[layer.get_output(0).name]
            values = e2m1_values(memory) if memory.dtype == torch.float4_e2m1fn_x2 else memory
            return values.reshape(tuple(layer.shape))
        return torch.from_numpy(np.array(weights)).reshape(tuple(layer.shape))

    def elementwise(self, layer: Any) -> Tensor:
        a, b = self.inputs(layer)
        assert a.dtype == b.dtype, layer.name
        assert a.ndim == b.ndim, layer.name
        return ELEMENTWISE[layer.op.name](a, b)

    def unary(self, layer: Any) -> Tensor:
        return UNARY[layer.op.name](*self.inputs(layer))

    def activation(self, layer: Any) -> Tensor:
        return ACTIVATIONS[layer.type.name](*self.inputs(layer))

    def identity(self, layer: Any) -> Tensor:
        return self.inputs(layer)[0]

    def quantize(self, layer: Any) -> Tensor:
        """One scale; E4M3 saturates."""
        x, scale = self.inputs(layer)
        assert scale.ndim == 0, layer.name
        return (x.float() / scale.float()).clamp(-448, 448).to(self.tensorrt.torch_dtype(layer.get_output(0).dtype))

    def dynamic_quantize(self, layer: Any) -> tuple[Tensor, Tensor]:
        """Blocks of the last axis: each one's scale is E4M3, in units of the given one."""
        x, unit = self.inputs(layer)
        assert layer.axis == x.ndim - 1 and unit.ndim == 0, layer.name
        blocks = x.float().unflatten(-1, (-1, layer.block_size))
        scales = (blocks.abs().amax(-1) / 6 / unit).clamp(max=448).to(torch.float8_e4m3fn)
        whole = (scales.float() * unit)[..., None]
        return nearest_e2m1(torch.where(whole == 0, 0.0, blocks / whole)).flatten(-2), scales

    def dequantize(self, layer: Any) -> Tensor:
        """One scale, a vector of them along an axis, or groups along one axis; products in float32, rounded once."""
        x, scales = self.inputs(layer)
        wide, scales = x.float(), scales.float()
        if scales.ndim == 1:
            scales = scales.view(-1, *(1,) * (wide.ndim - 1 - layer.axis))
        elif scales.ndim:
            sizes = [n // m for n, m in zip(wide.shape, scales.shape, strict=True)]
            assert sum(size > 1 for size in sizes) <= 1, layer.name
            for axis, size in enumerate(sizes):
                scales = scales.repeat_interleave(size, axis)
            assert scales.shape == wide.shape, layer.name
        return (wide * scales).to(self.tensorrt.torch_dtype(layer.get_output(0).dtype))

    def cast(self, layer: Any) -> Tensor:
        return self.inputs(layer)[0].to(self.tensorrt.torch_dtype(layer.to_type))

    def select(self, layer: Any) -> Tensor:
        return torch.where(*self.inputs(layer))

    def reduce(self, layer: Any) -> Tensor:
        (x,), axis = self.inputs(layer), axis_of(layer.axes)
        assert layer.keep_dims
        operations = {
            "SUM": lambda: x.sum(axis, keepdim=True, dtype=x.dtype),
            "AVG": lambda: x.mean(axis, keepdim=True),
            "MAX": lambda: x.amax(axis, keepdim=True),
        }
        return operations[layer.op.name]()

    def softmax(self, layer: Any) -> Tensor:
        return self.inputs(layer)[0].softmax(axis_of(layer.axes))

    def cumulative(self, layer: Any) -> Tensor:
        x, axis = self.inputs(layer)
        assert (layer.op.name, layer.exclusive, layer.reverse) == ("SUM", False, False)
        return x.cumsum(int(axis)).to(x.dtype)

    def topk(self, layer: Any) -> tuple[Tensor, Tensor]:
        assert layer.op.name == "MAX"
        values, indices = self.inputs(layer)[0].topk(layer.k, axis_of(layer.axes))
        return values, indices.int()

    def gather(self, layer: Any) -> Tensor:
        x, indices = self.inputs(layer)
        assert (indices >= 0).all(), layer.name
        assert (indices < x.shape[layer.axis]).all(), layer.name
        if layer.mode.name == "ELEMENT":
            return x.gather(layer.axis, indices.long())
        if layer.num_elementwise_dims == 0:
            flat = x.index_select(layer.axis, indices.flatten().long())
            return flat.unflatten(layer.axis, indices.shape)
        assert (layer.num_elementwise_dims, layer.axis) == (1, 1)
        return torch.stack([row[chosen.long()] for row, chosen in zip(x, indices)])

    def scatter(self, layer: Any) -> Tensor:
        x, indices, updates = self.inputs(layer)
        if layer.mode.name == "ELEMENT":
            return x.scatter(layer.axis, indices.long(), updates)
        assert indices.shape[:-1] == updates.shape[: indices.ndim - 1]
        result = x.clone()
        result[tuple(indices.long().unbind(-1))] = updates
        return result

    def slice(self, layer: Any) -> Tensor:
        (x,), (axis,) = self.inputs(layer), layer.axes
        (start,), (size,), (stride,) = layer.start, layer.shape, layer.stride
        assert stride == 1
        assert start + size <= x.shape[axis], layer.name
        return x.narrow(axis, start, size)

    def concatenation(self, layer: Any) -> Tensor:
        return torch.cat(self.inputs(layer), layer.axis)

    def shuffle(self, layer: Any) -> Tensor:
        x, order = self.inputs(layer)[0], list(layer.first_transpose)[: len(layer.get_input(0).shape)]
        x = x.permute(order)
        shape = self.input(layer, 1)
        if shape is not None:
            return x.reshape(shape.tolist())
        dims = layer.reshape_dims
        if dims is None or not len(dims):
            return x
        return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(dims)])

    def unsqueeze(self, layer: Any) -> Tensor:
        x, axes = self.inputs(layer)
        return x.unsqueeze(int(axes))

    def shape(self, layer: Any) -> Tensor:
        return torch.tensor(self.inputs(layer)[0].shape)

    def fill(self, layer: Any) -> Tensor:
        (count,), alpha, beta = self.inputs(layer)
        assert layer.operation.name == "LINSPACE"
        return (alpha + beta * torch.arange(int(count))).int()

    def matrix_multiply(self, layer: Any) -> Tensor:
        operands = []
        for x, operation in zip(self.inputs(layer), (layer.op0, layer.op1)):
            operands.append(x.transpose(-1, -2) if operation.name == "TRANSPOSE" else x)
        a, b = operands
        assert a.dtype == b.dtype, layer.name
        assert a.ndim == b.ndim, layer.name
        return a @ b

    def kv_cache_update(self, layer: Any) -> Tensor:
        cache, update, start = self.inputs(layer)
        for row, first in enumerate(start.tolist()):
            assert 0 <= first <= cache.shape[2] - update.shape[2], f"{layer.name} writes beyond the cache"
            cache[row, :, first : first + update.shape[2]] = update[row]
        return cache

    def attention_input(self, layer: Any) -> Tensor:
        query, key, value, mask = (self.input(layer, i) for i in range(4))
        lengths = self.input(layer, 6)
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        if lengths is not None:
            mask = mask & (torch.arange(key.shape[2]) < lengths[:, None])[:, None, None]
        scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value

    def dist_collective(self, layer: Any) -> Tensor:
        # The layer does not tell its operation; only gathering changes the shape.
        gathers = layer.get_output(0).shape[0] != layer.get_input(0).shape[0]
        assert self.exchange is not None
        parts = self.exchange(self.inputs(layer)[0])
        return torch.cat(parts, 0) if gathers else torch.stack(parts).sum(0)

    def attention_output(self, layer: Any) -> Tensor:
        return self.inputs(layer)[0]

    def moe(self, layer: Any) -> Tensor:
        x, chosen, share, gate, up, down = self.inputs(layer)[:6]
        flat = torch.zeros_like(x)
        for k in range(chosen.shape[-1]):
            index = chosen[..., k].long()
            gated = torch.nn.functional.silu(torch.einsum("btd,btdf->btf", x, gate[index]))
            hidden = gated * torch.einsum("btd,btdf->btf", x, up[index])
            flat += share[..., k : k + 1] * torch.einsum("btf,btfd->btd", hidden, down[index])
        return flat
