"""int4: integers from -8 to 7, eight to a word, with one scale for a group of consecutive columns or for a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import SCALE_DTYPES, Format, Part, by_blocks

#: Values a 32-bit word; the first is in the lowest bits.
PER_WORD = 8
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)
#: What is added to a value before it is stored.
OFFSET = 8


@dataclass(frozen=True)
class Int4(Format):
    """As compressed-tensors packs it: ``weight = (nibble - 8) * weight_scale``. group: columns a scale; None for all."""

    group: int | None = 32

    bits: ClassVar[int] = 4
    holder: ClassVar[str] = "weight_packed"

    @property
    def label(self) -> str:
        return f"int4 in groups of {self.group}" if self.group else "int4 per channel"

    def width(self, stored: int) -> int:
        return PER_WORD * stored

    def parts(self, n: int, k: int) -> dict[str, Part]:
        group = self.group or k
        return {
            "weight_packed": Part(("I32",), ((n, k // PER_WORD),)),
            "weight_scale": Part(SCALE_DTYPES, ((n, k // group),) if k % group == 0 else ()),
            "weight_shape": Part(("I64", "I32"), ((2,),)),
        }

    def problem(self, parts: dict[str, Tensor], k: int) -> str | None:
        stated, packed = parts["weight_shape"].tolist(), [len(parts["weight_packed"]), k]
        return None if stated == packed else f"has a weight_shape of {stated} beside packed values of {packed}"

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        nibbles = (parts["weight_packed"][rows].unsqueeze(2) >> SHIFTS) & 15
        values = (nibbles - OFFSET).float().flatten(1)
        return by_blocks(values, parts["weight_scale"][rows].float(), self.group or k)
