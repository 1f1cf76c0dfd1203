"""Leads a plugin of ``tensorrt.plugin`` through an engine build: the calls TensorRT makes, in their order.

Creator, plugin, descriptors and fields are TensorRT's own. Expressions of dynamic sizes exist only inside its builder, so
they are computed here: ``Expression`` keeps a value for given rows and T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.plugins import PLUGIN_NAMESPACE
from trtllm_replayssm.plugins.tensorrt.definitions import Definition

#: Value of an expression for (rows, T).
Value = Callable[[int, int], int]


class Built:
    """One layer of an engine. profile: (least, usual, most) of rows and of T.

    shapes: of the inputs, with ``rows`` and ``tokens`` for dynamic sizes.
    """

    def __init__(
        self,
        trt: ModuleType,
        tensorrt: TensorRT,
        definition: Definition,
        attributes: Mapping[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.trt, self.tensorrt, self.definition = trt, tensorrt, definition
        self.expressions = expression_class(trt)
        monkeypatch.setattr(trt, "DimsExprs", lambda count: [None] * count)
        monkeypatch.setattr(trt.plugin._tensor.SymInt32, "__call__", lambda self: self._expr)
        creator = trt.get_plugin_registry().get_creator(definition.name, "1", PLUGIN_NAMESPACE)
        self.fields = [self.field(name, value) for name, value in attributes.items()]
        collection, request = trt.PluginFieldCollection(self.fields), trt.QuickPluginCreationRequest.STRICT_AOT
        self.plugin = creator.create_plugin(
            definition.name, PLUGIN_NAMESPACE, collection, trt.TensorRTPhase.BUILD, request
        )

    def field(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            return self.trt.PluginField(name, value.encode(), self.trt.PluginFieldType.CHAR)
        kinds = {bool: "INT8", int: "INT64", float: "FLOAT64"}
        return self.trt.PluginField(name, np.array([value]), getattr(self.trt.PluginFieldType, kinds[type(value)]))

    def describe(self, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int | str, ...]]) -> tuple[list, list]:
        """Dtypes and shapes of the outputs; shapes as functions of (rows, T)."""
        self.types, self.shapes = [self.tensorrt.dtype(t) for t in dtypes], shapes
        output_types = self.plugin.get_output_data_types(self.types, [len(shape) for shape in shapes])
        builder = ExpressionBuilder(self.expressions)
        dims = [[builder.size(size) for size in shape] for shape in shapes]
        self.output_dims = self.plugin.get_output_shapes(dims, [], builder)
        self.output_types = output_types
        return [self.tensorrt.torch_dtype(t) for t in output_types], [
            [d.value for d in dims] for dims in self.output_dims
        ]

    def compile(
        self, rows: tuple[int, int, int], tokens: tuple[int, int, int], tactic: int | None = None
    ) -> SimpleNamespace:
        """Kernel name, PTX, grid, block and integers for a profile; grid and integers as functions of (rows, T).

        tactic: instead of the one that the layer offers.
        """
        profile = {"rows": rows, "tokens": tokens}
        in_out = [self.dynamic(t, shape, profile) for t, shape in zip(self.types, self.shapes)]
        count = len(in_out)
        for t, dims in zip(self.output_types, self.output_dims):
            bounds = [[d.value(rows[i], tokens[i]) for d in dims] for i in range(3)]
            in_out.append(self.descriptor(t, bounds))
        supported = self.plugin.get_supported_format_combinations(in_out, count)
        assert [s.type for s in supported] == [d.desc.type for d in in_out]
        self.plugin.configure_plugin(in_out[:count], in_out[count:])
        (offered,) = self.plugin.get_valid_tactics()
        self.plugin.set_tactic(offered if tactic is None else tactic)
        launch, integers = SimpleNamespace(), Integers()
        builder = ExpressionBuilder(self.expressions)
        self.plugin.get_launch_params(self.output_dims, in_out, count, launch, integers, builder)
        name, ptx = self.plugin.get_kernel([d.desc for d in in_out[:count]], [d.desc for d in in_out[count:]])
        axes = [getattr(launch, f"grid_{axis}").value for axis in "xyz"]
        block = [getattr(launch, f"block_{axis}").value(1, 1) for axis in "xyz"]
        return SimpleNamespace(
            tactic=offered,
            name=name,
            ptx=ptx,
            grid=lambda r, t: tuple(axis(r, t) for axis in axes),
            block=tuple(block),
            shared=launch.shared_mem.value(1, 1),
            integers=lambda r, t: tuple(integers.values[i].value(r, t) for i in range(integers.nbSymExprs)),
        )

    def dynamic(self, dtype: Any, shape: tuple[int | str, ...], profile: Mapping[str, tuple[int, int, int]]) -> Any:
        bounds = [[profile[size][i] if isinstance(size, str) else size for size in shape] for i in range(3)]
        return self.descriptor(dtype, bounds)

    def descriptor(self, dtype: Any, bounds: Sequence[Sequence[int]]) -> Any:
        least, usual, most = bounds
        result = self.trt.DynamicPluginTensorDesc()
        desc = self.trt.PluginTensorDesc()
        desc.type, desc.format = dtype, self.trt.TensorFormat.LINEAR
        desc.dims = [-1 if low != high else low for low, high in zip(least, most)]
        result.desc, result.min, result.opt, result.max = desc, least, usual, most
        return result


class Integers:
    """Where a plugin puts its integer arguments."""

    def __init__(self) -> None:
        self.nbSymExprs = 0
        self.values: dict[int, Any] = {}

    def __setitem__(self, place: int, value: Any) -> None:
        self.values[place] = value


def expression_class(trt: ModuleType) -> type:
    """A size as TensorRT hands it to plugins; made without the constructor that only its builder has."""

    class Expression(trt.IDimensionExpr):
        value: Value
        constant: bool

        def is_constant(self) -> bool:
            return self.constant

        def get_constant_value(self) -> int:
            assert self.constant
            return self.value(0, 0)

        def is_size_tensor(self) -> bool:
            return False

    return Expression


class ExpressionBuilder:
    """TensorRT's ``IExprBuilder`` for Expressions."""

    def __init__(self, expressions: type) -> None:
        self.expressions = expressions

    def make(self, value: Value, constant: bool) -> Any:
        made = self.expressions.__new__(self.expressions)
        made.value, made.constant = value, constant
        return made

    def constant(self, number: int) -> Any:
        return self.make(lambda rows, tokens: number, True)

    def size(self, size: int | str) -> Any:
        if isinstance(size, int):
            return self.constant(size)
        return self.make(lambda rows, tokens: {"rows": rows, "tokens": tokens}[size], False)

    def operation(self, op: Any, a: Any, b: Any) -> Any:
        compute = OPERATIONS[op.name]
        return self.make(
            lambda rows, tokens: compute(a.value(rows, tokens), b.value(rows, tokens)), a.constant and b.constant
        )


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "SUM": lambda a, b: a + b,
    "SUB": lambda a, b: a - b,
    "PROD": lambda a, b: a * b,
    "FLOOR_DIV": lambda a, b: a // b,
    "CEIL_DIV": lambda a, b: -(-a // b),
    "MAX": max,
    "MIN": min,
    "EQUAL": lambda a, b: int(a == b),
    "LESS": lambda a, b: int(a < b),
}
