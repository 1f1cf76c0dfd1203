"""What a kernel is and how it is launched: plain records, shared by the embedded engine and the TensorRT layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_replayssm.errors import EngineError

#: Most blocks along each axis of a grid, the same on every GPU (CUDA programming guide, "Technical Specifications per Compute
#: Capability"), and the largest integer that a kernel takes.
MOST_BLOCKS, MOST_INTEGER = (2**31 - 1, 65535, 65535), 2**31 - 1
#: Names of the element types in the kernels' sources.
CUDA_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Names and values that fix sizes, element types and token range of a variant.
Macros = tuple[tuple[str, str | int | float], ...]


@dataclass(frozen=True)
class Kernel:
    """One compile-time variant of a kernel.

    source: file under ``plugins/cuda``. symbol: its ``extern "C"`` entry point. block: threads of a block.
    defines: its macros.
    in_flight: bytes of state that a block keeps requested from memory; for reports.
    dynamic_shared: bytes of shared memory that the launch asks for besides the static ones. Plugin layers have none, because
        TensorRT's ahead-of-time plugins cannot ask.
    """

    source: str
    symbol: str
    block: int
    defines: Macros = ()
    in_flight: int = 0
    dynamic_shared: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel with everything a step's launch needs but the addresses.

    The parameters are, in order: the input addresses, ``integers`` as int32, the output addresses. A pool that the kernel
    updates is both an input and an output, and is passed in both places. This is the order in which TensorRT's
    ahead-of-time plugins pass them. A plugin's shared memory is static (48 KB at most), and no launch attribute is needed.

    Raises EngineError for a grid or an integer that no GPU and no kernel takes.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    integers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(blocks > most for blocks, most in zip(self.grid, MOST_BLOCKS, strict=True)):
            raise EngineError(
                f"a launch of the kernel {self.kernel.symbol} needs {self.grid} blocks, and a GPU takes {MOST_BLOCKS}",
                "let fewer requests and tokens run together (--max_batch_size, --max_num_tokens)",
            )
        if max(self.integers, default=0) > MOST_INTEGER:
            raise EngineError(
                f"the kernel {self.kernel.symbol} counts up to {MOST_INTEGER}, and is given {max(self.integers)}",
                "a request's tensors are too large: build with a smaller --max_seq_len",
            )


def slot_stride(pool: torch.Tensor) -> int:
    """Elements from one slot of a pool to the next. The slot itself must be dense.

    Raises ValueError otherwise.
    """
    if not pool[:1].is_contiguous():
        raise ValueError(f"a pool's slot must be dense; its strides are {pool.stride()} for shape {tuple(pool.shape)}")
    return pool.stride(0)


def token_stride(x: torch.Tensor) -> int:
    """Elements from one token of ``x [rows, T, channels]`` to the next, rows following without a gap.

    Raises ValueError when the layout is another one.
    """
    rows, tokens, _ = x.shape
    stride = x.stride(1) if tokens > 1 else x.stride(0)
    if x.stride(2) != 1 or (rows > 1 and x.stride(0) != tokens * stride):
        raise ValueError(f"tokens must lie behind each other; strides are {x.stride()} for shape {tuple(x.shape)}")
    return stride


def on_vectors(inputs: tuple[torch.Tensor, ...], bound: tuple[torch.Tensor, ...]) -> bool:
    """Whether the inputs that are moved in vectors start on 16 bytes, and so does every slot of the pools."""
    starts = (tensor.data_ptr() for tensor in (*inputs, *bound))
    return all(n % 16 == 0 for n in (*starts, *(pool.stride(0) * pool.itemsize for pool in bound)))
