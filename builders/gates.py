"""Gated DeltaNet layers whose q, k, v and z are quantised, and whose b and a are not: two weights, so that one can be kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source, stack_rows
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.keeping import packing_of, row_order
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.packed import Packing


def with_gates_apart(
    folder: HfFolder, decoder: HybridDecoder, sources: dict[str, Source]
) -> tuple[HybridDecoder, dict[str, Source]]:
    """The decoder and its sources with ``gates_apart`` in the layers where it helps; the others as they are."""
    layers, made = list(decoder.layers), dict(sources)
    for index, (name, layer) in enumerate(decoder.named_layers()):
        if not isinstance(layer, GatedDelta):
            continue
        parts = divided(folder, made[f"{name}.in_proj.weight"], 2 * layer.num_value_heads)
        if parts is not None:
            layers[index] = replace(layer, gates_apart=True)
            made[f"{name}.in_proj.weight"], made[f"{name}.gates.weight"] = parts
    return replace(decoder, layers=tuple(layers)), made


def divided(folder: HfFolder, source: Source, rows_behind: int) -> tuple[Source, Source] | None:
    """Sources of the rows before the last ``rows_behind`` and of these; None where their tensors are kept alike, or shared."""
    shapes = tuple(folder.entries[name].shape for name in source.names)
    order = row_order(source, shapes)
    if order is None:
        return None
    first, start = 0, sum(shape[0] for shape in shapes) - rows_behind
    while first < len(shapes) and sum(shape[0] for shape in shapes[: first + 1]) <= start:
        first += 1
    own, behind = order[:start], order[start:]
    if sum(shape[0] for shape in shapes[:first]) != start or bool((own >= start).any()) or bool((behind < start).any()):
        return None
    names = source.names[:first], source.names[first:]
    packings = [{packed_as(folder, name) for name in part} for part in names]
    if packings[0] == packings[1]:
        return None
    return picked(names[0], own), picked(names[1], behind - start)


def packed_as(folder: HfFolder, name: str) -> Packing | None:
    """How one tensor can be kept; None in full precision, and in a format that is always dequantised."""
    return packing_of(folder.quantised[name].format) if name in folder.quantised else None


def picked(names: tuple[str, ...], order: Tensor) -> Source:
    """Rows of the tensors, put one behind the other, in another order."""
    if torch.equal(order, torch.arange(len(order))):
        return Source(names, None if len(names) == 1 else stack_rows)
    return Source(names, lambda *tensors: torch.cat(tensors).index_select(0, order))
