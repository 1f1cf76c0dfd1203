"""FP8: E4M3 values with one scale for the tensor, one for each row, or one for each block of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import SCALAR, SCALE_DTYPES, Format, Part, Shape
from trtllm_replayssm.builders.hf.formats.codes import decode_e4m3
from trtllm_replayssm.builders.safetensors_reader import TensorEntry


@dataclass(frozen=True)
class Fp8(Format):
    """``weight = E4M3 * scale``. scale: name of the scale's tensor; it is a multiplier even where it is called an inverse."""

    scale: str = "weight_scale"

    bits: ClassVar[int] = 8

    @property
    def label(self) -> str:
        return "FP8 per tensor"

    def width(self, stored: int) -> int:
        return stored

    def scale_shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        return SCALAR

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {
            "weight": Part(("F8_E4M3",), ((n, k),)),
            self.scale: Part(SCALE_DTYPES, self.scale_shapes(n, k)),
            "input_scale": Part(SCALE_DTYPES, SCALAR, required=False),
        }

    def row_scales(self, scale: Tensor, rows: slice, k: int) -> Tensor:
        """Scales that fit the rows ``[len(rows), k]``."""
        return scale

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        return decode_e4m3(parts["weight"][rows]).mul_(self.row_scales(parts[self.scale].float(), rows, k))


@dataclass(frozen=True)
class ChannelFp8(Fp8):
    """One scale a row."""

    @property
    def label(self) -> str:
        return "FP8 per channel"

    def scale_shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        return ((n,), (n, 1))

    def row_scales(self, scale: Tensor, rows: slice, k: int) -> Tensor:
        return scale[rows].view(-1, 1)


@dataclass(frozen=True)
class BlockFp8(Fp8):
    """One scale for ``block`` rows and columns; blocks at the lower and right edges may be smaller.

    The blocks of stacked matrices begin anew with every matrix. A tensor that joins two matrices by rows has the blocks of
    the whole; scales of parts that were quantised apart do not fit its shape and are refused.
    """

    block: tuple[int, int] = (128, 128)

    @property
    def label(self) -> str:
        return "FP8 in blocks of {}x{}".format(*self.block)

    @property
    def row_block(self) -> int:
        return self.block[0]

    def scale_shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        return ((-(-n // self.block[0]), -(-k // self.block[1])),)

    def row_scales(self, scale: Tensor, rows: slice, k: int) -> Tensor:
        down, across = self.block
        own = scale[rows.start // down : -(-rows.stop // down)].flatten(1)
        return own.repeat_interleave(down, 0)[: rows.stop - rows.start].repeat_interleave(across, 1)[:, :k]


@dataclass(frozen=True)
class ModelOptBlockFp8(BlockFp8):
    """As ModelOpt writes FP8_PB_WO, in blocks of 128 x 128: scales ``[N / 128, 1, K / 128, 1]``, or without the axes of one.

    Sizes are rounded up, the values are those of the weight alone. Files joined from others call the scale
    ``weight_scale_inv``, as their source did.
    """

    def settled(self, names: dict[str, str], entries: dict[str, TensorEntry]) -> Format:
        return replace(self, scale="weight_scale_inv") if "weight_scale_inv" in names else self

    def scale_shapes(self, n: int, k: int) -> tuple[Shape, ...]:
        ((down, across),) = super().scale_shapes(n, k)
        return (down, 1, across, 1), (down, across)
