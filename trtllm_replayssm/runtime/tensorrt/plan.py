"""One plan on the device, and the shapes it is executed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.runtime.devices import available_bytes, made_current
from trtllm_replayssm.runtime.tensorrt.communicator import communicator

#: Bytes to whose multiples TensorRT wants addresses aligned.
ALIGNMENT = 256


class Plan:
    """A deserialised plan with the memory that its execution contexts share.

    cuda_engine: TensorRT's ICudaEngine. Contexts run one at a time, on a stream of their own: on the default stream TensorRT
    waits for the device around every step.
    """

    def __init__(
        self, tensorrt: TensorRT, cuda_engine: Any, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """group: of the ranks whose collective layers run together."""
        self.tensorrt, self.cuda_engine, self.device = tensorrt, cuda_engine, device
        self.communicator = communicator(group, device) if group and tensorrt.features.collective else None
        self.memory = torch.empty(self.working_bytes(), dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        names = [cuda_engine.get_tensor_name(place) for place in range(cuda_engine.num_io_tensors)]
        modes = {name: cuda_engine.get_tensor_mode(name).name for name in names}
        self.inputs = tuple(name for name in names if modes[name] == "INPUT")
        self.outputs = tuple(name for name in names if modes[name] == "OUTPUT")
        #: Inputs whose memory TensorRT itself says that an output is, by output.
        self.aliases = {}
        if tensorrt.features.aliases:
            found = {name: cuda_engine.get_aliased_input_tensor(name) for name in self.outputs}
            self.aliases = {name: source for name, source in found.items() if source}

    def working_bytes(self) -> int:
        """Bytes that a step needs besides weights and state. Raises EngineError when the device has less."""
        needed, free = max(1, self.cuda_engine.device_memory_size_v2), available_bytes(self.device)
        if free is not None and needed > free:
            raise EngineError(
                f"a step of the engine needs {bytes_text(needed)} to work in, but {self.device} has {bytes_text(free)} free",
                "build with a smaller --max_num_tokens or --max_batch_size",
            )
        return needed

    @property
    def stream_handle(self) -> int:
        return 0 if self.stream is None else self.stream.cuda_stream

    def context(self, profile: int) -> Any:
        """A new execution context for a profile, on the shared memory. Raises EngineError when TensorRT refuses."""
        strategy = self.tensorrt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        tensorrt_log(self.tensorrt.module).forget()
        with made_current(self.device):
            context = self.cuda_engine.create_execution_context(strategy)
            if context is None:
                self.refuse("TensorRT cannot prepare the engine for execution")
            context.set_device_memory(self.memory.data_ptr(), self.memory.numel())
            if not context.set_optimization_profile_async(profile, self.stream_handle):
                self.refuse(f"the engine has no profile {profile}")
            if self.communicator is not None and not context.set_communicator(self.communicator):
                self.refuse("TensorRT does not take the ranks' communicator")
        return context

    def refuse(self, what: str) -> NoReturn:
        raise EngineError(f"{what}: {tensorrt_log(self.tensorrt.module).first_error()}")


class Execution:
    """A plan in one shape at fixed addresses.

    The first run prepares kernels. From the second on, where ``graph`` is set, the run is a CUDA graph; a context belongs to
    one graph, because changing its shapes would pull the memory from under the graph's feet.
    """

    def __init__(self, plan: Plan, profile: int, graph: bool) -> None:
        self.plan, self.graphs_wanted = plan, graph
        self.context = plan.context(profile)
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def bind(self, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
        """Set the shapes of all inputs and the addresses of all tensors of the plan.

        Raises EngineError when TensorRT refuses one, or when an output that it calls an alias is bound to another address.
        """
        plan, context = self.plan, self.context
        for name in plan.inputs:
            if not context.set_input_shape(name, shapes[name]):
                plan.refuse(f"the engine does not take {name} of shape {list(shapes[name])}")
        for name in (*plan.inputs, *plan.outputs):
            address = tensors[name].data_ptr()
            # Memory of the device is aligned; what is left to see is where in it the tensor starts.
            offset = address - tensors[name].untyped_storage().data_ptr()
            if offset % ALIGNMENT or not context.set_tensor_address(name, address):
                plan.refuse(f"{name} cannot be bound to address {address:#x}")
        for name, source in plan.aliases.items():
            if tensors[source].data_ptr() != tensors[name].data_ptr():
                plan.refuse(f"{name} must be bound to the address of {source}")
        try:
            unknown = context.infer_shapes()
        except RuntimeError:
            plan.refuse("the engine does not take these shapes together")
        if unknown:
            plan.refuse(f"the engine wants to know more about {', '.join(unknown)}")

    def run(self) -> None:
        """Start the step behind whatever the current stream holds; the current stream waits for it."""
        stream = self.plan.stream
        if stream is None:
            self.enqueue()
            return
        current = torch.cuda.current_stream(self.plan.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.launch(stream)
        current.wait_stream(stream)

    def launch(self, stream: torch.cuda.Stream) -> None:
        self.runs += 1
        if not self.graphs_wanted or self.runs == 1:
            self.enqueue()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.enqueue()
        self.graph.replay()

    def enqueue(self) -> None:
        if not self.context.execute_async_v3(self.plan.stream_handle):
            self.plan.refuse("TensorRT could not run the step")
