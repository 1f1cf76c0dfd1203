"""Registers the plugin layers with ``tensorrt.plugin``.

Each has two implementations. Ahead of time, for use: the kernel is compiled while the engine is built, and lies in it. Just in
time, for debugging: TensorRT calls Python at every step, which launches the embedded engine's kernel and logs what it does.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import GenericAlias
from typing import Any, get_type_hints

import torch

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins import PLUGIN_NAMESPACE
from trtllm_replayssm.plugins.compiler import architecture, compile_kernel
from trtllm_replayssm.plugins.driver import launch_at
from trtllm_replayssm.plugins.launch import Launch
from trtllm_replayssm.plugins.tensorrt.definitions import ANY, DEFINITIONS, Bound, Definition
from trtllm_replayssm.plugins.tensorrt.symbolic import Symbolic, expression
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

log = logging.getLogger(__name__)

#: Bytes of shared memory that a kernel in an engine can have; nothing raises the limit for it.
SHARED_LIMIT = 48 << 10
#: Attributes that every layer has besides its own. compute_capability: of the GPU its kernel is compiled for, ten times the
#: major version plus the minor one (a number, because 10.14 loses the characters of a string). aliased: whether its pools
#: are declared to TensorRT as one memory, in and out; otherwise the caller binds both to one address.
COMMON_ATTRIBUTES: dict[str, type] = {"compute_capability": int, "aliased": bool}
#: Tactic of a prefill chunk; that of a decode or verify step is its number of tokens.
PREFILL_TACTIC = MAX_VERIFY_TOKENS + 1


def register_plugins(tensorrt: TensorRT) -> Any:
    """Put all layers into the registry, once a process; returns ``tensorrt.plugin.op.replayssm``, which makes them.

    Raises EngineError when this TensorRT has no plugin layers or cannot compile them ahead of time.
    """
    if not tensorrt.features.plugins:
        raise EngineError(f"{tensorrt.flavour} has no plugin layers", "build with TensorRT itself")
    tensorrt.check_numpy()
    trtp = importlib.import_module(f"{tensorrt.module.__name__}.plugin")
    if not hasattr(trtp, "aot_impl"):
        raise EngineError("this TensorRT cannot compile Python plugins ahead of time", "use TensorRT 10.14 or later")
    for definition in DEFINITIONS.values():
        if f"{PLUGIN_NAMESPACE}::{definition.name}" not in registered(trtp):
            register(tensorrt, trtp, definition)
    return getattr(trtp.op, PLUGIN_NAMESPACE)


def registered(trtp: Any) -> set[str]:
    space = getattr(trtp.op, PLUGIN_NAMESPACE, None) if PLUGIN_NAMESPACE in vars(trtp.op) else None
    return {f"{PLUGIN_NAMESPACE}::{name}" for name in DEFINITIONS if space is not None and name in vars(space)}


def register(tensorrt: TensorRT, trtp: Any, definition: Definition) -> None:
    """One layer: its outputs, its types and its kernel. TensorRT reads the functions' signatures, so they are made here."""
    plugin, inputs = QuickPlugin(tensorrt, trtp, definition), tuple(definition.inputs)
    attributes = attribute_types(definition)
    descriptions = dict.fromkeys(inputs, trtp.TensorDesc)
    outputs: Any = GenericAlias(tuple, (trtp.TensorDesc,) * (1 + len(definition.pools)))
    kernel: Any = tuple[str, bytes, trtp.KernelLaunchParams, trtp.SymExprs]
    plugin_id = f"{PLUGIN_NAMESPACE}::{definition.name}"
    tensors = dict.fromkeys(inputs, trtp.Tensor)
    made: Any = GenericAlias(tuple, (trtp.Tensor,) * (1 + len(definition.pools)))

    def described(*args: Any, **values: Any) -> Any:
        return plugin.outputs(args, values)

    def tuned(*args: Any) -> Any:
        return plugin.combinations(*plugin.divide(args))

    def compiled(*args: Any) -> Any:
        *others, tactic = args
        return plugin.kernel(*plugin.divide(others), tactic)

    def launched(*args: Any) -> None:
        *others, results, stream, tactic = args
        plugin.launch(*plugin.divide(others), results, stream, tactic)

    wanted = descriptions | attributes
    trtp.register(plugin_id)(with_signature(described, wanted, outputs))
    trtp.autotune(plugin_id)(with_signature(tuned, wanted | {"outputs": outputs}, list[trtp.AutoTuneCombination]))
    trtp.aot_impl(plugin_id)(with_signature(compiled, wanted | {"outputs": outputs, "tactic": int}, kernel))
    run_time = {"outputs": made, "stream": int, "tactic": int}
    trtp.impl(plugin_id)(with_signature(launched, tensors | attributes | run_time, None))


def with_signature(function: Callable, parameters: dict[str, Any], returned: Any) -> Callable:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = inspect.Signature(listed, return_annotation=returned)  # type: ignore[attr-defined]
    return function


# ---- attributes ------------------------------------------------------------------------------------------------------


def attribute_types(definition: Definition) -> dict[str, type]:
    """The layer's attributes as TensorRT types. An optional number is a float, NaN for none."""
    hints = get_type_hints(definition.attributes)
    names = [f.name for f in fields(definition.attributes) if f.name not in definition.fixed]
    own = {name: float if hints[name] == float | None else hints[name] for name in names}
    return own | COMMON_ATTRIBUTES


def to_plugin(definition: Definition, attributes: Any, capability: tuple[int, int], aliased: bool) -> dict[str, Any]:
    """An attributes dataclass as TensorRT attributes."""
    own = {
        name: math.nan if getattr(attributes, name) is None else kind(getattr(attributes, name))
        for name, kind in attribute_types(definition).items()
        if name not in COMMON_ATTRIBUTES
    }
    return own | {"compute_capability": 10 * capability[0] + capability[1], "aliased": aliased}


def from_plugin(definition: Definition, values: dict[str, Any]) -> Any:
    """The dataclass that ``to_plugin`` took."""
    own = {name: value for name, value in values.items() if name not in COMMON_ATTRIBUTES}
    given = {n: None if isinstance(v, float) and math.isnan(v) else v for n, v in own.items()}
    return definition.attributes(**given, **definition.fixed)


# ---- the plugin ------------------------------------------------------------------------------------------------------


class QuickPlugin:
    """The functions of one layer that TensorRT calls, in terms of descriptors (``tensorrt.plugin.TensorDesc``)."""

    def __init__(self, tensorrt: TensorRT, trtp: Any, definition: Definition) -> None:
        self.tensorrt, self.trtp, self.definition = tensorrt, trtp, definition

    def divide(self, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and attributes by name from positional arguments; the outputs behind them follow from both."""
        inputs, attributes = len(self.definition.inputs), attribute_types(self.definition)
        return dict(zip(self.definition.inputs, args)), dict(zip(attributes, args[inputs:]))

    def outputs(self, inputs: Sequence[Any], values: dict[str, Any]) -> tuple[Any, ...]:
        """Descriptors of the outputs. Raises ValueError for inputs that do not fit the attributes."""
        given, attributes = dict(zip(self.definition.inputs, inputs)), from_plugin(self.definition, values)
        self.check(given, attributes)
        source = given[self.definition.tokens_of]
        rows, count = source.shape_expr[0], source.shape_expr[1]
        *leading, width = self.definition.result_sizes(attributes)
        result = self.trtp.from_shape_expr((*(rows, count)[: len(leading)], width), source.dtype)
        pools = (given[name] for name in self.definition.pools)
        return (result, *(pool.aliased() if values["aliased"] else pool.like() for pool in pools))

    def check(self, given: dict[str, Any], attributes: Any) -> None:
        dtypes = {name: self.tensorrt.torch_dtype(tensor.dtype) for name, tensor in given.items()}
        for name, spec in self.definition.inputs.items():
            allowed = spec.dtypes if spec.like is None else (dtypes[spec.like],)
            if dtypes[name] not in allowed:
                self.refuse(f"{name} is {dtypes[name]}, not {' or '.join(map(str, allowed))}")
            sizes = spec.sizes(attributes)
            if spec.pool:
                sizes = (ANY, self.definition.slot_elements(attributes, name, dtypes[name]))
            shape = given[name].shape_expr
            if len(shape) != len(sizes):
                self.refuse(f"{name} has {len(shape)} axes, not {len(sizes)}")
            for axis, size in enumerate(sizes):
                # While TensorRT only asks for types, sizes are not there yet.
                if size != ANY and not shape[axis].is_fake and shape[axis].is_constant:
                    found = shape[axis].constant_value()
                    if found != size:
                        self.refuse(f"axis {axis} of {name} is {found}, not {size}")

    def refuse(self, reason: str) -> None:
        raise ValueError(f"{PLUGIN_NAMESPACE}::{self.definition.name}: {reason}")

    def combinations(self, given: dict[str, Any], values: dict[str, Any]) -> list[Any]:
        """The types the layer was given, linear, and the one tactic of the profile that is being built."""
        types = [TYPE_NAMES[self.tensorrt.torch_dtype(given[name].dtype)] for name in given]
        pools = [types[tuple(given).index(name)] for name in self.definition.pools]
        result = types[tuple(given).index(self.definition.tokens_of)]
        return [self.trtp.AutoTuneCombination(", ".join((*types, result, *pools)), "LINEAR", [self.tactic(given)])]

    def kernel(self, given: dict[str, Any], values: dict[str, Any], tactic: int) -> tuple[str, bytes, Any, Any]:
        """Entry point, PTX, launch parameters and integer arguments, for the shapes of the profile at hand.

        Kernels are compiled for a number of tokens. TensorRT keeps one kernel for each tactic, so a tactic that belongs to
        another profile than the shapes would be launched on the wrong number of tokens: it is refused.
        """
        record = self.record(given, values)
        if tactic != self.tactic(given):
            self.refuse(f"tactic {tactic} was asked for shapes of tactic {self.tactic(given)}")
        binary = compile_kernel(record.kernel, architecture(*divmod(values["compute_capability"], 10)))
        launch = self.trtp.KernelLaunchParams()
        grid = (expression(size, self.trtp) for size in record.grid)
        launch.grid_x, launch.grid_y, launch.grid_z = grid
        launch.block_x, launch.shared_mem = record.kernel.block, record.kernel.dynamic_shared
        if record.kernel.dynamic_shared > SHARED_LIMIT:
            self.refuse(f"{record.kernel.symbol} takes more shared memory than TensorRT gives a kernel")
        arguments = self.trtp.SymIntExprs(len(record.integers))
        for place, value in enumerate(record.integers):
            arguments[place] = self.trtp.SymInt32(expression(value, self.trtp))
        return record.kernel.symbol, binary.ptx, launch, arguments

    def launch(
        self, given: dict[str, Any], values: dict[str, Any], results: Sequence[Any], stream: int, tactic: int
    ) -> None:
        """Launch the kernel on tensors (``tensorrt.plugin.Tensor``) and log it; just in time."""
        shape = tuple(given[self.definition.tokens_of].shape)
        bound = {
            name: Bound(self.tensorrt.torch_dtype(tensor.dtype), tuple(tensor.shape)[-1])
            for name, tensor in given.items()
        }
        record = self.definition.launch(from_plugin(self.definition, values), bound, *shape[:2])
        log.debug("%s %s, tactic %d: %s on %s", self.definition.name, shape, tactic, record.kernel.symbol, record.grid)
        inputs, outputs = ([tensor.data_ptr for tensor in tensors] for tensors in (given.values(), results))
        launch_at(record, torch.cuda.current_device(), inputs, outputs, stream)

    def record(self, given: dict[str, Any], values: dict[str, Any]) -> Launch:
        """The launch record of the embedded engine, with rows and T symbolic where the profile leaves them open.

        Whatever the record decides, it decides for the usual number of rows and the largest T.
        """
        source = given[self.definition.tokens_of]
        least, usual, most = bounds(source.shape)
        bound = {
            name: Bound(self.tensorrt.torch_dtype(tensor.dtype), bounds(tensor.shape)[2][-1])
            for name, tensor in given.items()
        }

        def size(axis: int, value: int) -> int:
            return value if least[axis] == most[axis] else Symbolic(value, lambda _: source.shape_expr[axis])

        sizes = [size(axis, value) for axis, value in enumerate((usual[0], most[1]))]
        return self.definition.launch(from_plugin(self.definition, values), bound, *sizes)

    def tactic(self, given: dict[str, Any]) -> int:
        """The tactic of the profile that is being built."""
        return min(bounds(given[self.definition.tokens_of].shape)[2][1], PREFILL_TACTIC)


def bounds(shape: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Least, usual and largest sizes of a tensor in the profile that is being built."""
    if not shape.is_dynamic:
        return (tuple(shape),) * 3
    return tuple(shape.min), tuple(shape.opt), tuple(shape.max)


#: ``tensorrt.plugin``'s names of types.
TYPE_NAMES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.int32: "INT32",
    torch.int8: "INT8",
}
