"""NVFP4: E2M1 values, an E4M3 scale for 16 consecutive columns, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import SCALAR, SCALE_DTYPES, Format, Part, by_blocks
from trtllm_replayssm.builders.hf.formats.codes import decode_e4m3, unpack_e2m1

BLOCK = 16


def values_and_blocks(holder: str, n: int, k: int) -> dict[str, Part]:
    return {
        holder: Part(("U8",), ((n, k // 2),)),
        "weight_scale": Part(("F8_E4M3",), ((n, k // BLOCK),) if k % BLOCK == 0 else ()),
    }


@dataclass(frozen=True)
class ModelOptNvfp4(Format):
    """As ModelOpt writes it: ``weight = E2M1 * (weight_scale * weight_scale_2)``. Weight-only files lack input_scale.

    smoothed: the layer's input is multiplied by ``pre_quant_scale [K]`` first (AWQ), which is the same as multiplying the
    weight's columns. It is absent where an earlier layer has taken it up.
    """

    smoothed: bool = False

    whole: ClassVar[str] = "weight_scale_2"

    @property
    def label(self) -> str:
        return "NVFP4 with AWQ" if self.smoothed else "NVFP4"

    def width(self, stored: int) -> int:
        return 2 * stored

    def parts(self, n: int, k: int) -> dict[str, Part]:
        parts = values_and_blocks(self.holder, n, k)
        parts[self.whole] = Part(("F32",), SCALAR)
        parts["input_scale"] = Part(("F32",), SCALAR, required=False)
        if self.smoothed:
            parts["pre_quant_scale"] = Part(SCALE_DTYPES, ((k,),), required=False)
        return parts

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        scales = decode_e4m3(parts["weight_scale"][rows]) * parts[self.whole]
        made = by_blocks(unpack_e2m1(parts["weight"][rows]), scales, BLOCK)
        return made * parts["pre_quant_scale"].float() if "pre_quant_scale" in parts else made


@dataclass(frozen=True)
class CompressedNvfp4(Format):
    """As compressed-tensors writes it: ``weight = E2M1 * (weight_scale / weight_global_scale)``."""

    holder: ClassVar[str] = "weight_packed"
    whole: ClassVar[str] = "weight_global_scale"
    aside: ClassVar[tuple[str, ...]] = ("input_global_scale",)

    @property
    def label(self) -> str:
        return "NVFP4"

    def width(self, stored: int) -> int:
        return 2 * stored

    def parts(self, n: int, k: int) -> dict[str, Part]:
        parts = values_and_blocks(self.holder, n, k)
        parts[self.whole] = Part(("F32",), SCALAR)
        parts["input_global_scale"] = Part(("F32",), SCALAR, required=False)
        return parts

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        scales = decode_e4m3(parts["weight_scale"][rows]) / parts[self.whole]
        return by_blocks(unpack_e2m1(parts["weight_packed"][rows]), scales, BLOCK)
