"""CUDA graphs of decode and verify steps: what the host would launch one by one is launched at once.

A graph is captured for a number of rows (a bucket), of tokens a row, and a bound of the KV cache, the first time that it is
needed. Its inputs are copied to fixed addresses; the pools never move. All graphs share one memory pool, so that what one
computes is overwritten by the next that runs, whichever that is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trtllm_replayssm.network.deferred import resolved

#: Set to 0 to launch every kernel by itself.
SWITCH = "TRTLLM_REPLAYSSM_CUDA_GRAPHS"
#: Names of element types in CUDA's array interface; 16-bit floats travel as integers.
INTERFACE_TYPES = {4: "<i4", 2: "<i2"}


def graphs_wanted() -> bool:
    """Whether the environment leaves CUDA graphs on."""
    return os.environ.get(SWITCH, "1") != "0"


@dataclass(frozen=True)
class StepShape:
    """What a graph is captured for. kv_len: bound of the positions that a row sees. last_only: see Session.step."""

    rows: int
    tokens: int
    kv_len: int
    last_only: bool

    @property
    def input_size(self) -> int:
        """int32 words of the inputs: token ids ``[rows, tokens]``, then slot, query length and mode of each row."""
        return self.rows * (self.tokens + 3)

    def inputs(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of ``buffer``: token ids, slots, query lengths, modes."""
        ids, *per_row = buffer.split([self.rows * self.tokens, self.rows, self.rows, self.rows])
        slots, lengths, modes = per_row
        return ids.view(self.rows, self.tokens), slots, lengths, modes


#: Computes a step from its inputs: what the head read, and the logits.
Forward = Callable[[StepShape, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Captured:
    """A graph, the buffer that its inputs are copied to, and its results, valid until the next graph runs."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    hidden: Tensor
    logits: Tensor


class StepGraphs:
    """Graphs of one session by shape."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: captures them; by default all sessions'. Graphs that run at the same time need each its own, because what a
        library does on one stream is done in one workspace.
        """
        self.device = device
        self.captured: dict[StepShape, Captured] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = stream or capture_stream(device)

    def get(self, shape: StepShape, forward: Forward) -> Captured:
        """The graph for this shape, captured now if it has not been.

        forward: must not wait for the device, must write nothing for rows whose slot is -1, and is the same at every call.
        """
        if shape not in self.captured:
            self.captured[shape] = self.capture(shape, forward)
        return self.captured[shape]

    def capture(self, shape: StepShape, forward: Forward) -> Captured:
        inputs = torch.empty(shape.input_size, dtype=torch.int32, device=self.device)
        ids, slots, lengths, modes = shape.inputs(inputs)
        for tensor, value in ((ids, 0), (slots, -1), (lengths, 1), (modes, 0)):
            tensor.fill_(value)
        # A run before the capture, of padding alone, compiles and loads kernels and lets libraries allocate.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            forward(shape, inputs)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory, stream=self.stream, capture_error_mode="thread_local"):
            hidden, logits = (resolved(result) for result in forward(shape, inputs))
        return Captured(graph, inputs, alias(hidden), alias(logits))


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all sessions: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


class Interface:
    """A tensor's memory as CUDA's array interface describes it."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": INTERFACE_TYPES[size],
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def alias(tensor: Tensor) -> Tensor:
    """The same memory without a claim to it: the graphs that are captured later may use it, too."""
    return torch.as_tensor(Interface(tensor), device=tensor.device).view(tensor.dtype)
