"""A format that this package does not read, of a module that the model may not need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trtllm_replayssm.builders.hf.formats.base import Format, Part, Shape
from trtllm_replayssm.builders.safetensors_reader import TensorEntry
from trtllm_replayssm.errors import UnsupportedModelError


@dataclass(frozen=True)
class Unread(Format):
    """The name of a format in a table of modules. refusal: what to say when the model uses one of them."""

    name: str
    refusal: UnsupportedModelError = field(compare=False)

    @property
    def label(self) -> str:
        return f"{self.name}, which is not read"

    def width(self, stored: int) -> int:
        return stored

    def parts(self, n: int, k: int) -> dict[str, Part]:
        raise self.refusal

    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        raise self.refusal

    def check(self, module: str, names: dict[str, str], entries: dict[str, TensorEntry]) -> Shape:
        """The shape of the stored values, which is all that can be said."""
        return max((entries[name].shape for name in names.values()), key=len)
