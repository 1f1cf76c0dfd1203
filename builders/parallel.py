"""Parameters of a layer, and how tensor parallelism cuts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trtllm_replayssm.errors import UserError


@dataclass(frozen=True)
class Segment:
    """Consecutive indices of a parameter's split axis that are divided over the ranks by themselves.

    size: indices over all ranks. units: how many indivisible parts (heads, groups) they form.
    replicate: with fewer units than ranks, several ranks hold the same unit (key/value heads); units == 0 means that
    every rank holds the whole segment.
    """

    size: int
    units: int
    replicate: bool = False

    def cut(self, rank: int, tp_size: int) -> slice:
        """The rank's part of the segment."""
        if self.units == 0:
            return slice(0, self.size)
        unit = self.size // self.units
        if self.units % tp_size == 0:
            count = self.units // tp_size
            return slice(rank * count * unit, (rank + 1) * count * unit)
        start = rank * self.units // tp_size
        return slice(start * unit, (start + 1) * unit)


@dataclass(frozen=True)
class Parameter:
    """Shape of one weight over all ranks, and how it is cut and kept.

    axis: the axis that tensor parallelism splits, along ``segments``; None keeps the whole weight on every rank.
    float32: stays in float32 whatever the model's dtype (decay parameters, routers).
    nonzero: an all-zero tensor under this name can only be a broken file.
    """

    shape: tuple[int, ...]
    axis: int | None = None
    segments: tuple[Segment, ...] = ()
    float32: bool = False
    nonzero: bool = True

    def __post_init__(self) -> None:
        if self.axis is not None and sum(s.size for s in self.segments) != self.shape[self.axis]:
            raise ValueError(f"segments {self.segments} do not add up to axis {self.axis} of {self.shape}")

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """The shape that one rank holds."""
        if self.axis is None:
            return self.shape
        local = sum(len(range(s.size)[s.cut(0, tp_size)]) for s in self.segments)
        return (*self.shape[: self.axis], local, *self.shape[self.axis + 1 :])

    def shard(self, tensor: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """The rank's part of ``tensor``, which has ``shape``."""
        if self.axis is None or tp_size == 1:
            return tensor
        parts, start = [], 0
        for segment in self.segments:
            cut = segment.cut(rank, tp_size)
            parts.append(tensor.narrow(self.axis, start + cut.start, cut.stop - cut.start))
            start += segment.size
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def column(out: int, width: int, units: int, replicate: bool = False) -> Parameter:
    """A linear weight ``[out, width]`` whose rows are divided by units (heads, or single rows)."""
    return Parameter((out, width), 0, (Segment(out, units, replicate),))


def row(out: int, width: int, units: int) -> Parameter:
    """A linear weight ``[out, width]`` whose inputs are divided; its product is summed over the ranks."""
    return Parameter((out, width), 1, (Segment(width, units),))


def divide(what: str, count: int, tp_size: int, replicate: bool = False) -> int:
    """``count / tp_size``, or 1 where a replicated unit is shared by several ranks.

    Raises UserError when whole units cannot be given to every rank.
    """
    if count % tp_size == 0:
        return count // tp_size
    if replicate and tp_size % count == 0:
        return 1
    raise UserError(
        f"{count} {what} cannot be divided over tp_size {tp_size}", f"choose a tp_size that divides {count}"
    )
