"""MXFP4: E2M1 values, a power of two for 32 consecutive columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import Format, Part, by_blocks
from trtllm_replayssm.builders.hf.formats.codes import decode_e8m0, unpack_e2m1

BLOCK = 32


@dataclass(frozen=True)
class Mxfp4(Format):
    """As compressed-tensors writes it: ``weight = E2M1 * 2^(weight_scale - 127)``."""

    bits: ClassVar[int] = 4
    holder: ClassVar[str] = "weight_packed"

    @property
    def label(self) -> str:
        return "MXFP4"

    def width(self, stored: int) -> int:
        return 2 * stored

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {
            "weight_packed": Part(("U8",), ((n, k // 2),)),
            "weight_scale": Part(("U8", "F8_E8M0"), ((n, k // BLOCK),) if k % BLOCK == 0 else ()),
        }

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        return by_blocks(unpack_e2m1(parts["weight_packed"][rows]), decode_e8m0(parts["weight_scale"][rows]), BLOCK)
