"""Linear weights that stay quantised: how they are stored, and the values that they stand for.

A weight ``[..., N, K]`` named ``X.weight`` is stored as a few tensors, whose scales belong to single rows. So scales of
matrices that were quantised apart stay exact when their rows are joined, regrouped or divided over ranks, and blocks lie
along one axis only, which is what TensorRT dequantises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.plugins.reference.read_copy import unpack_e2m1

#: Columns of NVFP4 that share a scale.
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Packing:
    """How one weight is stored.

    quant_algo: FP8, E4M3 values and float32 scales; or NVFP4, two E2M1 values a byte (the even column in the low nibble),
    E4M3 scales, and one float32 scale a row. group_size: columns that share a scale, the last group may have fewer; None for
    one scale a row. divides: the scale of a row of NVFP4 divides those of its groups, instead of multiplying them.
    input_scale: float32, what the layer's inputs are divided by before they are rounded to E4M3, too, or to NVFP4 with block
    scales; None where the checkpoint has none.
    """

    quant_algo: Literal["FP8", "NVFP4"]
    group_size: int | None = None
    divides: bool = False
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if self.input_scale is not None and not 0 < self.input_scale < math.inf:
            raise ValueError(f"an input_scale of {self.input_scale}")
        right = {"FP8": self.group_size is None or self.group_size > 0, "NVFP4": self.group_size == NVFP4_GROUP}
        if not right.get(self.quant_algo) or (self.divides and self.quant_algo != "NVFP4"):
            raise ValueError(f"{self.quant_algo} in groups of {self.group_size}, divides {self.divides}")

    def layout(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of the stored tensors of a weight of that shape, by name; the first one holds the values."""
        *lead, k = shape
        if self.quant_algo == "FP8":
            scales = (*lead, math.ceil(k / (self.group_size or k)))
            return {name: (torch.float8_e4m3fn, shape), f"{name}_scale": (torch.float32, scales)}
        return {
            name: (torch.uint8, (*lead, k // 2)),
            f"{name}_scale": (torch.float8_e4m3fn, (*lead, k // NVFP4_GROUP)),
            f"{name}_scale_2": (torch.float32, tuple(lead)),
        }

    @property
    def columns(self) -> tuple[int | None, ...]:
        """For each stored tensor, the weight's columns that one of its columns stands for; None where it is all of them."""
        return (1, self.group_size) if self.quant_algo == "FP8" else (2, NVFP4_GROUP, None)

    @property
    def padding(self) -> tuple[int, ...]:
        """For each stored tensor, what a row of zeros has in it."""
        return (0, 0) if self.quant_algo == "FP8" else (0, 0, int(self.divides))


@dataclass(frozen=True)
class PackedWeight:
    """A weight in its stored form. parts: in the order of ``Packing.layout``. dtype: of the values that ``dense`` makes."""

    packing: Packing
    parts: tuple[Tensor, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        values = self.parts[0]
        return (*values.shape[:-1], values.shape[-1] * (2 if self.packing.quant_algo == "NVFP4" else 1))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: int) -> PackedWeight:
        """One of stacked weights."""
        return PackedWeight(self.packing, tuple(part[index] for part in self.parts), self.dtype)

    def dense(self) -> Tensor:
        """The values: products in float32, rounded once. Asks nothing of the host, so that a CUDA graph may hold it."""
        if self.packing.quant_algo == "FP8":
            values, scales = self.parts
            return scaled(values.float(), scales, self.packing.group_size).to(self.dtype)
        values, scales, rows = self.parts
        by_group, by_row = scales.float(), rows[..., None]
        factors = by_group / by_row if self.packing.divides else by_group * by_row
        return scaled(unpack_e2m1(values), factors, NVFP4_GROUP).to(self.dtype)


#: A weight in either form.
StoredWeight = Tensor | PackedWeight


def without_input_scales(weights: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """The weights for products whose inputs are not rounded."""
    return {
        name: replace(weight, packing=replace(weight.packing, input_scale=None))
        if isinstance(weight, PackedWeight)
        else weight
        for name, weight in weights.items()
    }


def scaled(values: Tensor, scales: Tensor, group: int | None) -> Tensor:
    """``values [..., k]`` times ``scales [..., ceil(k / group)]``; in place."""
    k = values.shape[-1]
    if group is None or k % group == 0:
        values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
        return values
    return values.mul_(scales.repeat_interleave(group, -1)[..., :k])


def dense(weight: StoredWeight) -> Tensor:
    """The weight's values, whichever way it is stored."""
    return weight.dense() if isinstance(weight, PackedWeight) else weight


def assembled(
    tensors: Mapping[str, Tensor], packings: Mapping[str, Packing], dtype: torch.dtype
) -> dict[str, StoredWeight]:
    """A rank's stored tensors as its weights by name. dtype: of the activations that packed weights are multiplied with."""
    weights: dict[str, StoredWeight] = dict(tensors)
    for name, packing in packings.items():
        # Only the names count: the shapes that they are listed with do not matter here.
        names = packing.layout(name, (1, NVFP4_GROUP))
        parts = tuple(tensors[part] for part in names)
        for part in names:
            del weights[part]
        weights[name] = PackedWeight(packing, parts, dtype)
    return weights
