"""The whole state of one request, taken out of its slot: it travels as one object or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.plugins.reference.delta_rule import DeltaRule
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.replay import Recurrence, compute_dtype
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class SlotCursors:
    """Where a slot stands, on the host.

    committed, folded: see plugins.cursors. written: positions below it were written at some time; a ring of n rows has
    lost what lies before ``written - n``.
    """

    committed: int = 0
    folded: int = 0
    written: int = 0


@dataclass(frozen=True)
class SlotState:
    """A copy of everything a slot holds. fingerprint: of the engine; rank: whose share of the heads this is.

    tensors: by pool name, without the slot axis; KV caches only up to ``cursors.committed``.
    """

    fingerprint: str
    rank: int
    cursors: SlotCursors
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def recurrences(
    decoder: HybridDecoder, weights: Mapping[str, Tensor], pools: Mapping[str, Tensor], replay: ReplayConfig
) -> dict[str, Recurrence]:
    """The recurrence of every recurrent layer by the prefix of its pools, ready to replay a ring."""
    found: dict[str, Recurrence] = {}
    for name, layer in decoder.named_parts():
        if isinstance(layer, Mamba2):
            dtype = compute_dtype(pools[f"{name}.state"])
            found[name] = Mamba2Recurrence(weights[f"{name}.A_log"].to(dtype), weights[f"{name}.D"].to(dtype))
        elif isinstance(layer, GatedDelta | Kda):
            found[name] = DeltaRule(replay.fold == "derived")
    return found


def layer_pools(pools: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """The pools of one layer, by their short names."""
    return {name.removeprefix(f"{layer}."): pool for name, pool in pools.items() if name.startswith(f"{layer}.")}
