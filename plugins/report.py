"""What a compiled kernel needs of a multiprocessor, and how much memory traffic that keeps in flight."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.plugins.compiler import Binary, compile_kernel
from trtllm_replayssm.plugins.launch import Kernel

#: Of a multiprocessor of compute capability 9.0 and 10.x: registers, their allocation per warp, warps, blocks and bytes of
#: shared memory (CUDA programming guide, "Technical Specifications per Compute Capability").
REGISTERS, REGISTER_UNIT, WARPS, BLOCKS, SHARED_BYTES = 65536, 256, 64, 32, 228 * 1024
#: Shared memory that the system takes of every block.
SHARED_RESERVED = 1024
#: A kernel with more could not be an ahead-of-time TensorRT plugin.
SHARED_LIMIT = 48 * 1024


@dataclass(frozen=True)
class KernelReport:
    """Resources of one kernel on one architecture."""

    kernel: Kernel
    arch: str
    binary: Binary

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds at once."""
        warps = self.kernel.block // 32
        registers = -(-self.binary.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT * warps
        shared = self.binary.shared_bytes + self.kernel.dynamic_shared + SHARED_RESERVED
        return min(REGISTERS // registers, WARPS // warps, BLOCKS, SHARED_BYTES // shared)

    @property
    def occupancy(self) -> float:
        return self.blocks * self.kernel.block / (32 * WARPS)

    @property
    def in_flight(self) -> int:
        """Bytes of state that a full multiprocessor keeps requested."""
        return self.blocks * self.kernel.in_flight

    @property
    def fault(self) -> str:
        """Why the kernel must not be released as it is; empty when it may."""
        if self.binary.spill_bytes or self.binary.stack_bytes:
            return "registers spill to memory"
        if self.binary.shared_bytes > SHARED_LIMIT:
            return "shared memory exceeds 48 KB a block"
        return "" if self.blocks else "a multiprocessor holds no block"


def report(kernel: Kernel, arch: str) -> KernelReport:
    return KernelReport(kernel, arch, compile_kernel(kernel, arch))


def released_kernels() -> list[Kernel]:
    """The variants of every plugin, and of the embedded engine's own kernels, that are checked ahead of time."""
    from trtllm_replayssm.plugins.device import (
        advance,
        attention,
        causal_conv,
        elementwise,
        experts,
        gated_delta,
        kda,
        linear,
        mamba2,
        mamba2_quantised,
        materialise,
        norms,
    )

    recurrent = (mamba2, mamba2_quantised, gated_delta, kda, materialise)
    modules = (advance, causal_conv, *recurrent, norms, elementwise, experts, linear, attention)
    return [kernel for module in modules for kernel in module.variants()]
