"""What every format of quantised weights says: which tensors, of which dtypes and shapes, and what the weight is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trtllm_replayssm.builders.safetensors_reader import FLOAT_DTYPES, TensorEntry
from trtllm_replayssm.errors import CheckpointError

Shape = tuple[int, ...]
#: Shapes in which a single number is stored.
SCALAR: tuple[Shape, ...] = ((), (1,))
#: dtypes in which scales are stored that are plain numbers.
SCALE_DTYPES = tuple(FLOAT_DTYPES)
#: Elements that are dequantised at once: bounds the temporaries, not the weight.
CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Part:
    """One of a module's tensors. dtypes: as a safetensors header names them. shapes: any of them is accepted.

    No shapes at all: the weight's width cannot be cut into the format's blocks.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    required: bool = True


class Format(ABC):
    """One way to store the weight of a linear layer ``[N, K]``, or of all experts of a layer ``[E, N, K]``.

    bits: of a value. holder: the tensor that holds the values; the others are scales. aside: the tensor that is known and not
    needed to make the weight, the scale of the layer's inputs. Subclasses are frozen dataclasses: two descriptions of a
    module agree when their formats are equal.
    """

    bits: ClassVar[int]
    holder: ClassVar[str] = "weight"
    aside: ClassVar[str] = "input_scale"

    @property
    @abstractmethod
    def label(self) -> str:
        """What messages call the format."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether the format is also one of the layer's inputs, where their scale is stored."""
        return True

    def settled(self, names: dict[str, str], entries: dict[str, TensorEntry]) -> Format:
        """The format with what its description leaves open and a module's tensors tell. names: tensors by part."""
        return self

    @property
    def row_block(self) -> int:
        """Rows that share a scale: slices given to ``rows`` start at multiples of it."""
        return 1

    @abstractmethod
    def width(self, stored: int) -> int:
        """K of a weight whose holder's last axis has ``stored`` elements."""

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, Part]:
        """Every tensor of a module whose weight is ``[n, k]``, by name behind the module's."""

    @abstractmethod
    def rows(self, parts: dict[str, Tensor], rows: slice, k: int) -> Tensor:
        """float32 ``[len(rows), k]`` of one matrix, whose parts are given whole."""

    def problem(self, parts: dict[str, Tensor], k: int) -> str | None:
        """What is wrong with the values of one matrix's parts, as the end of a sentence about the module."""
        return None

    # ---- for every format --------------------------------------------------------------------------------------------

    def check(self, module: str, names: dict[str, str], entries: dict[str, TensorEntry]) -> Shape:
        """The weight's shape ``[N, K]`` or ``[E, N, K]``.

        names: tensors of the module by part. Raises CheckpointError, naming tensor and module, when a tensor is missing,
        surplus, or of another dtype or shape than the format has.
        """
        if self.holder not in names:
            raise self.fail(module, f"lacks {self.holder}")
        stored = entries[names[self.holder]].shape
        if len(stored) not in (2, 3):
            raise self.fail(module, f"has {names[self.holder]} of shape {list(stored)}, which is no matrix")
        lead, n, k = stored[:-2], stored[-2], self.width(stored[-1])
        parts = self.parts(n, k)
        for part, expected in parts.items():
            if part not in names:
                if expected.required:
                    raise self.fail(module, f"lacks {part}")
                continue
            entry = entries[names[part]]
            if entry.dtype not in expected.dtypes:
                raise self.fail(module, f"has {names[part]} of dtype {entry.dtype}, not {any_of(expected.dtypes)}")
            if not expected.shapes:
                raise self.fail(module, f"is {k} wide, which {part} cannot divide into blocks")
            shapes = stacked_shapes(expected.shapes, lead)
            if entry.shape not in shapes:
                raise self.fail(module, f"has {names[part]} of shape {list(entry.shape)}, not {any_of(shapes)}")
        surplus = sorted(names[part] for part in names if part not in parts)
        if surplus:
            raise self.fail(module, f"has {', '.join(surplus)}, which the format does not know")
        return (*lead, n, k)

    def dequantise(self, module: str, parts: dict[str, Tensor], shape: Shape) -> Tensor:
        """The float32 weight of that shape. Temporaries stay at CHUNK_ELEMENTS a tensor.

        Raises CheckpointError, naming the module, for values that contradict one another.
        """
        n, k = shape[-2:]
        made = torch.empty(shape, dtype=torch.float32)
        matrices = made.view(-1, n, k)
        step = max(1, CHUNK_ELEMENTS // k // self.row_block) * self.row_block
        scalars = {part for part, described in self.parts(n, k).items() if () in described.shapes}
        for index, matrix in enumerate(matrices):
            own = {part: pick(tensor, index, part in scalars, len(shape)) for part, tensor in parts.items()}
            problem = self.problem(own, k)
            if problem:
                raise self.fail(module, problem)
            for start in range(0, n, step):
                rows = slice(start, min(start + step, n))
                matrix[rows] = self.rows(own, rows, k)
        return made

    def fail(self, module: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{module} is described as {self.label}, but {problem}",
            "the description and the tensors belong to different checkpoints, or a file is incomplete",
        )


def stacked_shapes(shapes: tuple[Shape, ...], lead: Shape) -> tuple[Shape, ...]:
    """The shapes of all experts' parts. A single number may be one for all of them."""
    if not lead:
        return shapes
    own = tuple(lead + shape for shape in shapes)
    return (*shapes, *own, (*lead, 1, 1)) if () in shapes else own


def pick(tensor: Tensor, index: int, scalar: bool, dims: int) -> Tensor:
    """The part of one matrix out of the stacked part of all of them."""
    if scalar:
        flat = tensor.flatten()
        return flat[index if len(flat) > 1 else 0]
    return tensor[index] if dims == 3 else tensor


def any_of(options: Iterable[object]) -> str:
    return " or ".join(str(list(option)) if isinstance(option, tuple) else str(option) for option in options)


def by_blocks(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """``values [n, k]`` times ``scales [n, k / block]``, each scale for ``block`` consecutive columns; in place."""
    values.unflatten(1, (-1, block)).mul_(scales.unsqueeze(2))
    return values
