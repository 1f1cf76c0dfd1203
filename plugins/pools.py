"""Pools: the tensors that hold one kind of per-request state for all slots of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

#: TensorRT wants bound addresses aligned to this many bytes, and a prefill binds a pool at a slot's offset.
SLOT_ALIGNMENT = 256


@dataclass(frozen=True)
class Pool:
    """One state tensor of a layer: ``shape`` and ``dtype`` of one slot.

    kind says what the bytes are for, in reports: ``state`` (checkpoint), ``copy`` (of it, for reads), ``ring``, ``conv``,
    ``kv`` or ``cursor``.
    block: positions of a request that each row of a cache ``[H, rows, D]`` (kv) stands for.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    block: int = 1

    @property
    def positions(self) -> int:
        """Positions of a request that a cache has room for."""
        return self.shape[1] * self.block

    def rows(self, start: int, stop: int) -> slice:
        """Rows of a cache that are final once the positions ``start ... stop - 1`` behind the earlier ones are."""
        return slice(start // self.block, stop // self.block)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, padded to SLOT_ALIGNMENT."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def allocate(self, slots: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A zeroed pool ``[slots, *shape]`` whose slot stride is ``slot_bytes``.

        Zero is not needed for correctness (a fresh slot is never read); it keeps dumps readable.
        """
        per_slot = self.slot_bytes // self.dtype.itemsize
        flat = torch.zeros(slots, per_slot, dtype=self.dtype, device=device)
        dense = flat[:, : math.prod(self.shape)].unflatten(1, self.shape)
        # A view of a single slot may have any stride from it to the next; kernels look at it.
        return dense.as_strided(dense.shape, (per_slot, *dense.stride()[1:]))
