"""NVFP4: E2M1 values, an E4M3 scale for 16 consecutive columns, one float32 scale for the tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import SCALAR, SCALE_DTYPES, Format, Part, by_blocks
from trtllm_replayssm.builders.hf.formats.codes import decode_e4m3, unpack_e2m1
from trtllm_replayssm.builders.safetensors_reader import TensorEntry

BLOCK = 16


def values_and_blocks(holder: str, n: int, k: int) -> dict[str, Part]:
    return {
        holder: Part(("U8",), ((n, k // 2),)),
        "weight_scale": Part(("F8_E4M3",), ((n, k // BLOCK),) if k % BLOCK == 0 else ()),
    }


@dataclass(frozen=True)
class ModelOptNvfp4(Format):
    """As ModelOpt writes it: ``weight = E2M1 * (weight_scale * weight_scale_2)``.

    smoothed: the layer's input is multiplied by ``pre_quant_scale [K]`` first (AWQ), which is the same as multiplying the
    weight's columns. It is absent where an earlier layer has taken it up. weight_only: inputs are not quantised; an
    input_scale that is there was left over from a file whose label was changed, and means nothing. The weight is the same.
    """

    smoothed: bool = False
    weight_only: bool = field(default=False, compare=False)

    bits: ClassVar[int] = 4
    whole: ClassVar[str] = "weight_scale_2"

    @property
    def rounds_inputs(self) -> bool:
        return not self.weight_only

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
        made = self.smooth_rows(parts, rows)
        return made * parts["pre_quant_scale"].float() if "pre_quant_scale" in parts else made

    def smooth_rows(self, parts: dict[str, Tensor], rows: slice) -> Tensor:
        """The rows of the matrix that the smoothed inputs are multiplied with."""
        scales = decode_e4m3(parts["weight_scale"][rows]) * parts[self.whole]
        return by_blocks(unpack_e2m1(parts["weight"][rows]), scales, BLOCK)


@dataclass(frozen=True)
class SvdNvfp4(ModelOptNvfp4):
    """A matrix of low rank beside the quantised one (SVDQuant): ``weight = (quantised + b a) * pre_quant_scale``.

    rank: of ``svdquant_lora_b [N, rank]`` and ``svdquant_lora_a [rank, K]``; the tensors tell it.
    """

    smoothed: bool = True
    rank: int = 0

    @property
    def label(self) -> str:
        return "NVFP4 with SVD"

    def parts(self, n: int, k: int) -> dict[str, Part]:
        low_rank = {
            "svdquant_lora_b": Part(SCALE_DTYPES, ((n, self.rank),)),
            "svdquant_lora_a": Part(SCALE_DTYPES, ((self.rank, k),)),
        }
        return super().parts(n, k) | low_rank

    def settled(self, names: dict[str, str], entries: dict[str, TensorEntry]) -> Format:
        shape = entries[names["svdquant_lora_b"]].shape if "svdquant_lora_b" in names else ()
        return replace(self, rank=shape[-1] if shape else 0)

    def smooth_rows(self, parts: dict[str, Tensor], rows: slice) -> Tensor:
        # In float64, so that the product does not depend on how many rows are made at once.
        b, a = parts["svdquant_lora_b"][rows].double(), parts["svdquant_lora_a"].double()
        return super().smooth_rows(parts, rows) + (b @ a).float()


@dataclass(frozen=True)
class CompressedNvfp4(Format):
    """As compressed-tensors writes it: ``weight = E2M1 * (weight_scale / weight_global_scale)``."""

    bits: ClassVar[int] = 4
    holder: ClassVar[str] = "weight_packed"
    whole: ClassVar[str] = "weight_global_scale"
    aside: ClassVar[str] = "input_global_scale"

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
