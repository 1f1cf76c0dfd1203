"""A TensorRT that builds and runs engines on a CPU, from the parts that do: what the session tests run against.

Networks are genuine (``tensorrt_rtx``). A plan is a ticket for the network and its profiles. A context takes shapes and
addresses as TensorRT does, refuses what TensorRT would refuse, and computes the network by the interpreter, reading inputs from
the bound addresses and writing outputs to them: an address that is bound wrongly is read and written all the same.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from emission import REFERENCES, RecordedPlugins, logical, rtx
from interpreter import Interpreter
from torch import Tensor
from torch.nn.functional import pad

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.network.tensorrt.emitter import Emitter
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

VERSION = "11.4.0.106"
MAGIC = "plan of the stand-in"


class StandIn:
    """The module ``tensorrt``. pools: of the engine to build, by name, so that plugin layers see their own shapes."""

    def __init__(self, pools: dict[str, Pool], **features: bool) -> None:
        self.rtx, self.pools = rtx(), pools
        self.features = {"plugins": True, **features}
        self.networks: list[tuple[Any, KeptPlugins, list[Any]]] = []
        self.waiting: list[KeptPlugins] = []
        #: See Interpreter.
        self.exchange: Callable[[Tensor], list[Tensor]] | None = None
        self.contexts: list[Context] = []
        self.configs: list[Any] = []
        self.module = ModuleType("tensorrt")
        vars(self.module).update(vars(self.rtx.module))
        vars(self.module).update(
            __version__=VERSION,
            Builder=lambda log: Builder(self, self.rtx.module.Builder(log)),
            Runtime=lambda log: Runtime(self, log),
            Refitter=lambda cuda_engine, log: Refitter(self, cuda_engine),
        )

    def tensorrt(self) -> TensorRT:
        found = TensorRT.of(self.module, "tensorrt")
        vars(found.features).update(self.features)
        return found

    def plugins(self) -> KeptPlugins:
        self.waiting.append(KeptPlugins())
        return self.waiting[-1]


class KeptPlugins(RecordedPlugins):
    """Holds on to the memory behind the constants, which TensorRT copies into the plan."""

    def __init__(self) -> None:
        super().__init__(whole=True)

    def __call__(self, emitter: Emitter, *args: Any) -> tuple[Any, ...]:
        self.emitter = emitter
        return super().__call__(emitter, *args)


class Builder:
    """Stands for tensorrt.Builder; remembers the profiles, which a builder config does not give back."""

    def __init__(self, stand_in: StandIn, builder: Any) -> None:
        self.stand_in, self.builder = stand_in, builder
        self.profiles: list[Any] = []

    def create_network(self, flags: int) -> Any:
        return self.builder.create_network(flags)

    def create_builder_config(self) -> Any:
        return self.builder.create_builder_config()

    def create_optimization_profile(self) -> Any:
        self.profiles.append(self.builder.create_optimization_profile())
        return self.profiles[-1]

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        assert config.num_optimization_profiles == len(self.profiles)
        self.stand_in.configs.append(config)
        ticket = len(self.stand_in.networks)
        # The builder must outlive its network.
        self.stand_in.networks.append(((network, self), self.stand_in.waiting.pop(0), self.profiles))
        stripped = config.get_flag(self.stand_in.module.BuilderFlag.STRIP_PLAN)
        return json.dumps({"magic": MAGIC, "ticket": ticket, "stripped": stripped}).encode()


class Runtime:
    """Stands for tensorrt.Runtime."""

    def __init__(self, stand_in: StandIn, log: Any) -> None:
        self.stand_in, self.log = stand_in, log

    def deserialize_cuda_engine(self, content: Any) -> Any:
        try:
            plan = json.loads(bytes(content))
        except ValueError:
            severity = self.stand_in.module.ILogger.Severity.ERROR
            self.log.log(
                severity, "deserializeCudaEngine: Error Code 1: Serialization (magicTag is wrong. In f at /x:1)"
            )
            return None
        cuda_engine = CudaEngine(self.stand_in, *self.stand_in.networks[plan["ticket"]])
        cuda_engine.plan, cuda_engine.stripped = plan, plan["stripped"]
        return cuda_engine


class CudaEngine:
    """Stands for ICudaEngine."""

    stripped = False
    plan: dict[str, Any]

    def __init__(self, stand_in: StandIn, network: Any, plugins: KeptPlugins, profiles: list[Any]) -> None:
        self.stand_in, self.plugins, self.profiles = stand_in, plugins, profiles
        self.network, self.builder = network
        # Where the network was cut there is a plugin layer.
        inputs = [self.network.get_input(i) for i in range(self.network.num_inputs)]
        outputs = [self.network.get_output(i) for i in range(self.network.num_outputs)]
        self.inputs, self.outputs = ([t for t in ts if not t.name.startswith("cut/")] for ts in (inputs, outputs))
        self.tensors = {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}
        self.weight_streaming_budget_v2 = 0

    device_memory_size_v2 = 512
    num_io_tensors = property(lambda self: len(self.tensors))

    def get_tensor_name(self, place: int) -> str:
        return list(self.tensors)[place]

    def get_tensor_mode(self, name: str) -> Any:
        mode = self.stand_in.module.TensorIOMode
        return mode.INPUT if self.tensors[name].is_network_input else mode.OUTPUT

    def get_aliased_input_tensor(self, name: str) -> str | None:
        """As TensorRT's layer for KV caches has it."""
        cache = name.removesuffix("_out")
        return cache if name.endswith("_cache_out") else None

    def get_weight_streaming_automatic_budget(self) -> int:
        return 7

    def create_serialization_config(self) -> Any:
        return SimpleNamespace(clear_flag=lambda flag: self.plan.update(excludes=flag.name != "EXCLUDE_WEIGHTS"))

    def serialize_with_config(self, settings: Any) -> bytes:
        return json.dumps(self.plan | {"stripped": self.stripped or self.plan.pop("excludes", True)}).encode()

    def create_execution_context(self, strategy: Any) -> Any:
        assert not self.stripped
        assert strategy == self.stand_in.module.ExecutionContextAllocationStrategy.USER_MANAGED
        self.stand_in.contexts.append(Context(self))
        return self.stand_in.contexts[-1]


class Refitter:
    """Stands for tensorrt.Refitter; the weights must be the very ones that the network was made with."""

    def __init__(self, stand_in: StandIn, cuda_engine: CudaEngine) -> None:
        self.stand_in, self.cuda_engine = stand_in, cuda_engine
        self.weights = cuda_engine.plugins.emitter.named_weights
        self.given: set[str] = set()

    def get_all_weights(self) -> list[str]:
        return list(self.weights) if self.cuda_engine.stripped else []

    def set_named_weights(self, name: str, weights: Any) -> bool:
        given, wanted = torch.from_numpy(np.array(weights.numpy())), self.weights[name].flatten()
        fits = given.dtype == wanted.dtype and torch.equal(given, wanted)
        self.given |= {name} if fits else set()
        return fits

    def refit_cuda_engine(self) -> bool:
        self.cuda_engine.stripped = self.given != set(self.weights)
        return not self.cuda_engine.stripped


class Context:
    """Stands for IExecutionContext."""

    def __init__(self, engine: CudaEngine) -> None:
        self.cuda_engine, self.profile = engine, -1
        self.memory, self.runs = 0, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.cuda_engine.device_memory_size_v2
        self.memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return 0 <= profile_index < len(self.cuda_engine.profiles)

    def set_communicator(self, communicator: Any) -> bool:
        self.communicator = communicator
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.cuda_engine.profiles[self.profile].get_shape(name)
        declared = tuple(self.cuda_engine.tensors[name].shape)
        fits = len(shape) == len(declared) and all(low <= n <= high for low, n, high in zip(least, shape, most))
        if fits:
            self.shapes[name] = tuple(shape)
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self.cuda_engine.tensors, name
        self.addresses[name] = memory
        return memory != 0

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self.cuda_engine.inputs if tensor.name not in self.shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, stand_in = self.cuda_engine, self.cuda_engine.stand_in
        assert self.memory
        assert self.addresses.keys() == engine.tensors.keys()
        self.runs += 1
        # Equal symbols are equal sizes.
        sizes: dict[str, int] = {}
        for tensor in engine.inputs:
            for axis, size in enumerate(self.shapes[tensor.name]):
                symbol = tensor.get_dimension_name(axis)
                assert not symbol or sizes.setdefault(symbol, size) == size, (tensor.name, symbol)
        # Copies, because the interpreter works in place: results must arrive by way of the outputs' addresses.
        feeds = {tensor.name: self.memory_of(tensor, self.shapes[tensor.name]).clone() for tensor in engine.inputs}
        longest = engine.profiles[self.profile].get_shape("input_ids")[2][1]
        plugins = Resolver(engine.plugins, stand_in.pools, longest)
        interpreter = Interpreter(stand_in.rtx, engine.network, plugins, stand_in.exchange)
        results = interpreter.run(feeds)
        for name in (tensor.name for tensor in engine.outputs):
            value = results[name]
            self.memory_of(engine.tensors[name], tuple(value.shape)).copy_(value)
        return True

    def memory_of(self, tensor: Any, shape: tuple[int, ...]) -> Tensor:
        """What lies at the tensor's address."""
        dtype = self.cuda_engine.stand_in.rtx.torch_dtype(tensor.dtype)
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = (ctypes.c_char * count).from_address(self.addresses[tensor.name])
        return torch.frombuffer(raw, dtype=dtype).view(shape)


class Resolver:
    """What the plugin layers that the network was cut at would have computed.

    longest: T of the longest steps of the profile at hand, for which its kernels are compiled, whatever a step brings.
    """

    #: Inputs ``[rows, T, ...]`` of the layers that treat short and long steps differently.
    TOKENS = {"mamba2": ("xbc", "dt"), "gated_delta": ("qkv", "a", "b"), "kda": ("qkv", "f", "b")}

    def __init__(self, plugins: RecordedPlugins, pools: dict[str, Pool], longest: int) -> None:
        self.calls = {outputs[0].name: (kind, a, inputs) for kind, a, inputs, outputs in plugins.calls}
        self.pools, self.longest = pools, min(longest, MAX_VERIFY_TOKENS + 1)

    def __call__(self, interpreter: Interpreter, name: str) -> Tensor:
        kind, attributes, inputs = self.calls[name]
        values = {key: interpreter.value(tensor.name) for key, tensor in inputs.items()}
        for key, tensor in inputs.items():
            if tensor.name in self.pools:
                values[key] = logical(values[key], self.pools[tensor.name])
        if kind not in self.TOKENS:
            return REFERENCES[kind](attributes, values)
        given = values[self.TOKENS[kind][0]].shape[1]
        for key in self.TOKENS[kind]:
            values[key] = pad(values[key], (0, 0, 0, max(0, self.longest - given)))
        return REFERENCES[kind](attributes, values)[:, :given]


#: Interfaces that the stand-ins' public members must be members of.
INTERFACES: dict[str, type] = {
    "Builder": Builder,
    "Runtime": Runtime,
    "ICudaEngine": CudaEngine,
    "IExecutionContext": Context,
    "Refitter": Refitter,
}
#: What the stand-ins keep for themselves and for the tests.
OWN = {
    "stand_in", "builder", "profiles", "log", "plugins", "network", "inputs", "outputs", "tensors", "cuda_engine", "profile",
    "memory", "runs", "shapes", "addresses", "memory_of", "stripped", "plan", "weights", "given",
}  # fmt: skip
