"""What a family says about a checkpoint, and the recipes by which its tensors become ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.model import HybridDecoder


@dataclass(frozen=True)
class Source:
    """How one of our parameters is made from tensors of the checkpoint.

    names: tensors of the checkpoint, all of them required. make: from these tensors, in that order, to ours over all ranks;
    None for the one tensor as it is. The result must have exactly the parameter's shape. ``make`` is also run on meta
    tensors, to check every shape before any data is read, so it may look at shapes only, never at values.
    stacked: names form that many runs of equal length; ``make`` turns each run into one index of a new first axis. The runs
    are read and written one after the other, so that fused experts never lie in memory as a whole.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor] | None = None
    stacked: int = 0

    def runs(self) -> list[tuple[str, ...]]:
        """The names that are read together."""
        if not self.stacked:
            return [self.names]
        length = len(self.names) // self.stacked
        return [self.names[i * length : (i + 1) * length] for i in range(self.stacked)]

    def build(self, tensors: list[Tensor]) -> Tensor:
        """The parameter from the tensors of its one run, or one index of its first axis."""
        return tensors[0] if self.make is None else self.make(*tensors)


def stack_rows(*tensors: Tensor) -> Tensor:
    """One behind the other along the first axis: a fused projection."""
    return torch.cat(tensors, 0)


def rows(*names: str) -> Source:
    """A fused projection from separate ones, in that order."""
    return Source(names, stack_rows)


def experts(*runs: tuple[str, ...]) -> Source:
    """Fused experts ``[E, rows, width]`` from one run of names per expert: ``(gate, up)`` or ``(down,)``."""
    return Source(tuple(name for run in runs for name in run), stack_rows, len(runs))


def conv_taps(*names: str) -> Source:
    """Depthwise convolution weights ``[C, 1, K]`` as ``[C, K]``; several are put one behind the other."""
    return Source(names, lambda *tensors: torch.cat(tensors, 0).squeeze(1))


class Family(ABC):
    """One model family, bound to the config of one checkpoint.

    architectures: values of config.json ``architectures`` that this family reads. notes: what a user should know of this
    checkpoint, one sentence each; warnings, never errors.
    """

    architectures: ClassVar[tuple[str, ...]]

    def __init__(self, config: HfConfig, tensor_shapes: dict[str, tuple[int, ...]]) -> None:
        """Reads the config; ``tensor_shapes`` of the checkpoint (empty for a bare config.json) tell what it leaves open.

        Raises UnsupportedModelError or CheckpointError with the key or tensor that is at fault.
        """
        self.config, self.tensor_shapes = config, tensor_shapes
        self.notes: list[str] = []

    @abstractmethod
    def decoder(self) -> HybridDecoder:
        """The description of the model; with MTP layers when the checkpoint holds their tensors."""

    @abstractmethod
    def sources(self, decoder: HybridDecoder) -> dict[str, Source]:
        """A source for every name of ``decoder.parameters()`` (tp_size 1)."""

    def dropped(self, name: str) -> str | None:
        """Why a tensor of the checkpoint is left out on purpose, or None when it must be used."""
        return None
