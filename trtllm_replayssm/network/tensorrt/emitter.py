"""``Emitter``: adds single layers to a network definition, with checks and names. Knows no op of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.errors import EngineError

#: A network tensor (``ITensor``).
Tensor = Any


class Emitter:
    """Layers of one ``INetworkDefinition``.

    scope: prefix of the names of the layers that are added next. Host memory behind constants is kept alive here, as long
    as the emitter lives; TensorRT copies it when the engine is built, not before.
    """

    def __init__(self, tensorrt: TensorRT, network: Any) -> None:
        self.tensorrt, self.trt, self.network = tensorrt, tensorrt.module, network
        self.scope = "step"
        self._memory: dict[tuple, tuple[torch.Tensor, Tensor]] = {}
        #: Memory behind the constants, by the name that a refit knows it by, and the names by address.
        self.named_weights: dict[str, torch.Tensor] = {}
        self.weight_names: dict[int, str] = {}
        #: Sizes of every network input by name; dynamic ones by their symbol.
        self.inputs: dict[str, tuple[int | str, ...]] = {}
        #: Scope and kind of every plugin layer, in order; a cut network holds none of them.
        self.plugin_layers: list[tuple[str, str]] = []

    @contextmanager
    def scoped(self, scope: str) -> Iterator[None]:
        """Layers that are added inside are named after ``scope``."""
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer

    def added(self, layer: Any, op: str, *inputs: Tensor) -> Tensor:
        """Name the layer and return its first output. Raises EngineError when TensorRT refused to make it."""
        return self.named(layer, op, *inputs).get_output(0)

    def named(self, layer: Any, op: str, *inputs: Tensor) -> Any:
        if layer is None:
            shapes = ", ".join(str(list(x.shape)) for x in inputs)
            raise EngineError(f"TensorRT does not accept {op} over {shapes} in {self.scope}; its log says why")
        layer.name = f"{self.scope}/{op}_{self.network.num_layers - 1}"
        return layer

    def mark_output(self, tensor: Tensor, name: str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)

    def dtype(self, x: Tensor) -> torch.dtype:
        return self.tensorrt.torch_dtype(x.dtype)

    def input(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], dims: Sequence[str] = ("rows", "tokens")
    ) -> Tensor:
        """A network input; ``dims`` names its dynamic (-1) sizes in order, and equal names are equal sizes."""
        tensor = self.network.add_input(name, self.tensorrt.dtype(dtype), tuple(shape))
        if tensor is None:
            raise EngineError(f"TensorRT does not accept the input {name} {list(shape)}")
        unnamed = iter(dims)
        symbols = tuple(next(unnamed) if size == -1 else size for size in shape)
        for axis, symbol in enumerate(symbols):
            if isinstance(symbol, str):
                tensor.set_dimension_name(axis, symbol)
        self.inputs[name] = symbols
        return tensor

    # ---- constants ---------------------------------------------------------------------------------------------------

    def constant(self, value: torch.Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """The tensor's own memory as a network constant, once per memory and shape."""
        shape = tuple(value.shape if shape is None else shape)
        key = (value.data_ptr(), value.dtype, shape)
        if key not in self._memory:
            if not value.is_contiguous() or value.device.type != "cpu":
                raise ValueError(f"constants are dense and on the CPU, this one is {value.stride()} on {value.device}")
            weights = self.tensorrt.weights(value)
            layer = self.named(self.network.add_constant(shape, weights), "constant")
            self._memory[key] = value, layer.get_output(0)
            # The name belongs to the memory, and is given to the constants over it that exist: constants of other shapes too.
            name = self.weight_names.setdefault(value.data_ptr(), f"{self.scope}/weights_{len(self.weight_names)}")
            self.network.set_weights_name(weights, name)
            self.named_weights[name] = value
        return self._memory[key][1]

    def is_constant(self, x: Tensor) -> bool:
        return any(tensor is x for _, tensor in self.constants())

    def constants(self) -> Iterator[tuple[torch.Tensor, Tensor]]:
        """The memory behind every constant, and the constant."""
        yield from self._memory.values()

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """A number in the dtype of ``like``, of its rank, every size 1."""
        return self.number(value, self.dtype(like), len(like.shape))

    def number(self, value: float, dtype: torch.dtype, rank: int) -> Tensor:
        key = ("number", value, dtype, rank)
        if key not in self._memory:
            memory = torch.tensor(value, dtype=dtype)
            self._memory[key] = memory, self.constant(memory, (1,) * rank)
        return self._memory[key][1]

    def arange(self, count: int, rank: int) -> Tensor:
        """int32 ``0 ... count - 1`` along the last axis, the other axes of size 1."""
        key = ("arange", count, rank)
        if key not in self._memory:
            memory = torch.arange(count, dtype=torch.int32)
            self._memory[key] = memory, self.constant(memory, (1,) * (rank - 1) + (count,))
        return self._memory[key][1]

    def dynamic_arange(self, count: Tensor, delta: int = 1) -> Tensor:
        """int32 ``delta * [0 ... count - 1]`` for a shape tensor ``count [1]``."""
        layer = self.network.add_fill((1,), self.trt.FillOperation.LINSPACE, self.trt.int32)
        layer.set_input(0, count)
        layer.set_input(1, self.number(0, torch.int32, 0))
        layer.set_input(2, self.number(delta, torch.int32, 1))
        return self.added(layer, "arange", count)

    def dequantise(self, x: Tensor, scales: Tensor, dtype: torch.dtype, axis: int | None = None) -> Tensor:
        """``x * scales``: one scale, a vector of them along ``axis``, or as many axes as x with groups along one of them."""
        layer = self.network.add_dequantize(x, scales, self.tensorrt.dtype(dtype))
        self.named(layer, "dequantise", x, scales)
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    def quantise(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """``x / scale`` rounded to the nearest number of ``dtype``, at most its largest."""
        return self.added(self.network.add_quantize(x, scale, self.tensorrt.dtype(dtype)), "quantise", x, scale)

    def quantise_blocks(
        self, x: Tensor, block: int, scale: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Numbers of ``dtype`` and a scale for each block of the last axis, itself divided by ``scale`` and rounded."""
        dtypes = self.tensorrt.dtype(dtype), self.tensorrt.dtype(scale_dtype)
        layer = self.network.add_dynamic_quantize(x, len(x.shape) - 1, block, *dtypes)
        self.named(layer, "quantise_blocks", x).set_input(1, scale)
        return layer.get_output(0), layer.get_output(1)

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.dtype(x) == dtype:
            return x
        return self.added(self.network.add_cast(x, self.tensorrt.dtype(dtype)), "cast", x)

    def binary(self, op: str, a: Tensor, b: Tensor) -> Tensor:
        """An ElementWiseOperation by name; sizes are equal or 1."""
        kind = getattr(self.trt.ElementWiseOperation, op)
        return self.added(self.network.add_elementwise(a, b, kind), op.lower(), a, b)

    def unary(self, op: str, x: Tensor) -> Tensor:
        return self.added(self.network.add_unary(x, getattr(self.trt.UnaryOperation, op)), op.lower(), x)

    def activation(self, op: str, x: Tensor) -> Tensor:
        return self.added(self.network.add_activation(x, getattr(self.trt.ActivationType, op)), op.lower(), x)

    def select(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.added(self.network.add_select(condition, a, b), "select", condition, a, b)

    # ---- along an axis -----------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Tensor, axis: int) -> Tensor:
        """A ReduceOperation by name; the axis stays with size 1."""
        kind = getattr(self.trt.ReduceOperation, op)
        return self.added(self.network.add_reduce(x, kind, 1 << axis, True), f"reduce_{op.lower()}", x)

    def running_sum(self, x: Tensor, axis: int) -> Tensor:
        axis_tensor = self.number(axis, torch.int32, 0)
        kind = self.trt.CumulativeOperation.SUM
        return self.added(self.network.add_cumulative(x, axis_tensor, kind, False, False), "running_sum", x)

    def softmax(self, x: Tensor) -> Tensor:
        layer = self.network.add_softmax(x)
        self.named(layer, "softmax", x).axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, k, 1 << (len(x.shape) - 1))
        self.named(layer, "top_k", x)
        return layer.get_output(0), layer.get_output(1)

    def gather(self, x: Tensor, indices: Tensor, axis: int, shared_axes: int = 0) -> Tensor:
        """``x`` at ``indices`` along ``axis``; the first ``shared_axes`` axes of both run together."""
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.DEFAULT)
        self.named(layer, "gather", x, indices).axis = axis
        layer.num_elementwise_dims = shared_axes
        return layer.get_output(0)

    def gather_elements(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        layer = self.network.add_gather_v2(x, indices, self.trt.GatherMode.ELEMENT)
        self.named(layer, "gather_elements", x, indices).axis = axis
        return layer.get_output(0)

    def scatter_elements(self, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        """``x`` with ``updates`` at ``indices`` of the first axis."""
        layer = self.network.add_scatter(x, indices, updates, self.trt.ScatterMode.ELEMENT)
        self.named(layer, "scatter", x, indices, updates).axis = 0
        return layer.get_output(0)

    def scatter_nd(self, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        """``x`` with ``updates`` at the positions that the last axis of ``indices`` spells out."""
        layer = self.network.add_scatter(x, indices, updates, self.trt.ScatterMode.ND)
        return self.added(layer, "scatter_nd", x, indices, updates)

    def slice(self, x: Tensor, axis: int, start: int, size: int) -> Tensor:
        """``x[..., start : start + size, ...]``; the other axes, which may be dynamic, stay whole."""
        layer = self.network.add_slice(x, (start,), (size,), (1,))
        self.named(layer, "slice", x).axes = (axis,)
        return layer.get_output(0)

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        layer = self.network.add_concatenation(list(tensors))
        self.named(layer, "concat", *tensors).axis = axis
        return layer.get_output(0)

    # ---- layout ------------------------------------------------------------------------------------------------------

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """0 keeps the size of that axis, one -1 takes what is left."""
        layer = self.network.add_shuffle(x)
        self.named(layer, "reshape", x).reshape_dims = tuple(dims)
        return layer.get_output(0)

    def reshape_like(self, x: Tensor, shape: Tensor, sizes: Sequence[int]) -> Tensor:
        """To the sizes of a shape tensor; ``sizes`` states those that are known while the network is made."""
        layer = self.network.add_shuffle(x)
        self.named(layer, "reshape", x).set_input(1, shape)
        out = layer.get_output(0)
        if len(out.shape) != len(sizes):
            raise EngineError(f"TensorRT cannot tell the rank of a reshape to {list(sizes)} in {self.scope}")
        return out

    def unsqueeze(self, x: Tensor) -> Tensor:
        """With a first axis of size 1."""
        return self.added(self.network.add_unsqueeze(x, self.number(0, torch.int32, 1)), "unsqueeze", x)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        layer = self.network.add_shuffle(x)
        self.named(layer, "transpose", x).first_transpose = tuple(order)
        return layer.get_output(0)

    def shape(self, x: Tensor) -> Tensor:
        """The sizes at run time, int64 ``[rank]``."""
        return self.added(self.network.add_shape(x), "shape", x)

    def size(self, x: Tensor, axis: int) -> Tensor:
        """One size at run time, int64 ``[1]``."""
        return self.slice(self.shape(x), 0, axis, 1)

    # ---- products ----------------------------------------------------------------------------------------------------

    def matmul(self, a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
        """Over the last two axes; leading sizes are equal or 1."""
        plain, turned = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        forms = (turned if transpose_a else plain, turned if transpose_b else plain)
        layer = self.network.add_matrix_multiply(a, forms[0], b, forms[1])
        return self.added(layer, "matmul", a, b)
