"""Which quantised weights a conversion can keep, and their stored tensors in the layout of a rank file.

Decided from headers, weight by weight: whatever cannot be kept is dequantised, so that a checkpoint of any mixture converts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source, stack_rows
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.hf.formats.base import Format, Shape, pick
from trtllm_replayssm.builders.hf.formats.fp8 import BlockFp8, Fp8
from trtllm_replayssm.builders.hf.formats.nvfp4 import CompressedNvfp4, ModelOptNvfp4
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.network.packed import NVFP4_GROUP, Packing

#: What ``convert`` does with quantised weights.
Quantization = Literal["dequantise", "keep"]
QUANTIZATIONS: tuple[Quantization, ...] = ("dequantise", "keep")
#: Parts of a parameter's name that say that it is not the weight of a linear layer or of experts: tables, convolutions, and
#: mixings of residual streams.
NOT_LINEAR = ("vocab_embedding", "ngram", ".streams.", "conv1d", "indexer.taps", "indexer.position")


def packing_of(format: Format) -> Packing | None:
    """How a format's weights are kept, or None for one that is always dequantised."""
    if isinstance(format, BlockFp8):
        return Packing("FP8", format.block[1])
    if isinstance(format, Fp8):
        return Packing("FP8")
    if isinstance(format, ModelOptNvfp4) and not format.smoothed:
        return Packing("NVFP4", NVFP4_GROUP)
    if isinstance(format, CompressedNvfp4):
        return Packing("NVFP4", NVFP4_GROUP, divides=True)
    return None


def kept_packings(
    folder: HfFolder,
    sources: dict[str, Source],
    parameters: dict[str, Parameter],
    tp_size: int,
    warn: Callable[[str], None],
) -> dict[str, Packing]:
    """How each weight that stays quantised is stored, by name. Tells ``warn`` how many are dequantised, and why."""
    packings: dict[str, Packing] = {}
    reasons: Counter[str] = Counter()
    for name, parameter in parameters.items():
        source = sources[name]
        if not any(tensor in folder.quantised for tensor in source.names):
            continue
        found = kept_packing(folder, name, source, parameter, tp_size)
        if isinstance(found, Packing):
            packings[name] = replace(found, input_scale=input_scale(folder, source, found, parameter))
        else:
            reasons[found] += 1
    if not packings and not reasons:
        warn("no weight is quantised, so that --quantization keep changes nothing")
    if packings:
        counts = Counter(described(packing) for packing in packings.values()).most_common()
        warn(f"kept quantised, fused weights counted once: {', '.join(f'{count} {what}' for what, count in counts)}")
    for reason, count in reasons.most_common():
        warn(f"dequantised all the same: {count} weight(s), {reason}")
    return packings


def described(packing: Packing) -> str:
    group = f" in groups of {packing.group_size}" if packing.group_size else " with a scale a row"
    return packing.quant_algo + group


def is_multiplied(name: str, parameter: Parameter) -> bool:
    """Whether a weight goes into Network.linear or Network.experts only, and in the dtype of the activations."""
    axes = 3 if ".experts." in name else 2
    return not any(part in name for part in NOT_LINEAR) and not parameter.float32 and len(parameter.shape) == axes


def kept_packing(folder: HfFolder, name: str, source: Source, parameter: Parameter, tp_size: int) -> Packing | str:
    """The packing of one weight, or why it cannot be kept, as the end of a sentence."""
    if not is_multiplied(name, parameter):
        return "which are not the weights of linear layers or experts"
    quantised = [folder.quantised.get(tensor) for tensor in source.names]
    formats = {None if weight is None else packing_of(weight.format) for weight in quantised}
    if None in formats and all(quantised):
        return "whose format is not kept"
    if len(formats) > 1 or None in formats:
        return "which are joined from parts in different formats"
    (packing,) = formats
    assert packing is not None
    runs = {tuple(folder.entries[tensor].shape for tensor in run) for run in source.runs()}
    if any(row_order(source, shapes) is None for shapes in runs):
        return "whose rows or columns are rearranged in a way that scales cannot follow"
    steps = [step for step in packing.columns if step is not None]
    if any(stored_columns(parameter, rank, tp_size, step) is None for rank in range(tp_size) for step in steps):
        return f"whose groups of columns do not fit tp_size {tp_size}"
    return packing


def input_scale(folder: HfFolder, source: Source, packing: Packing, parameter: Parameter) -> float | None:
    """The scale of a linear layer's inputs: the largest of those that were stored with its parts, which have the same inputs.

    None for experts and groups of FP8, whose products are not computed from rounded inputs, where a part has none, and for
    formats of weights alone.
    Raises CheckpointError for a scale that is no positive number.
    """
    if len(parameter.shape) > 2 or (packing.quant_algo == "FP8" and packing.group_size is not None):
        return None
    scales: list[float] = []
    for tensor in source.names:
        weight = folder.quantised[tensor]
        stored = weight.parts.get(weight.format.aside)
        if stored is None or not weight.format.rounds_inputs:
            return None
        value = folder.stored(stored)
        scales.append(float(1 / value if packing.divides else value))
        if not 0 < scales[-1] < math.inf:
            raise CheckpointError(
                f"{stored} is {float(value)}, which is no scale", "the file is damaged; download it again"
            )
    return max(scales)


def row_order(source: Source, shapes: tuple[Shape, ...]) -> Tensor | None:
    """Which row of the run's tensors, put one behind the other, each row of the result is; None if it is not made so.

    Found by running the source on numbers that tell row and column.
    """
    rows, k = sum(shape[-2] for shape in shapes), shapes[0][-1]
    if source.make is None:
        return torch.arange(rows)
    if any(len(shape) != 2 or shape[1] != k for shape in shapes):
        return None
    if source.make is stack_rows:
        return torch.arange(rows)
    numbered = torch.arange(rows * k, dtype=torch.int32).view(rows, k)
    made = source.build(list(numbered.split([shape[0] for shape in shapes])))
    if made.dim() != 2 or made.shape[1] != k:
        return None
    order = made[:, 0] // k
    whole = torch.equal(made, order[:, None] * k + numbered[0]) and bool((order < rows).all())
    return order if whole else None


def kept_parts(
    folder: HfFolder, run: tuple[str, ...], source: Source, check: Callable[[str, Tensor], None]
) -> tuple[Tensor, ...]:
    """The stored tensors of one run over all ranks, in the order of ``Packing.layout``; E4M3 as bytes.

    check: given each tensor's name and dequantised values.
    """
    pieces: list[tuple[Tensor, ...]] = []
    for name in run:
        weight = folder.quantised[name]
        parts = weight.stored(folder.stored)
        check(name, weight.format.dequantise(weight.module, parts, weight.shape))
        pieces.append(own_scales(weight.format, parts, weight.shape))
    if source.make is None:
        return pieces[0]
    order = row_order(source, tuple(folder.entries[name].shape for name in run))
    assert order is not None
    return tuple(torch.cat(same).index_select(0, order) for same in zip(*pieces, strict=True))


def own_scales(format: Format, parts: dict[str, Tensor], shape: Shape) -> tuple[Tensor, ...]:
    """A weight's stored tensors with scales of each row's own; E4M3 as bytes."""
    n, k = shape[-2:]
    values = parts[format.holder].view(torch.uint8)
    stacked = range(shape[0]) if len(shape) == 3 else (0,)
    if isinstance(format, ModelOptNvfp4 | CompressedNvfp4):
        whole = parts[format.whole]
        rows = torch.stack([pick(whole, index, True, len(shape)).expand(n) for index in stacked])
        return values, parts["weight_scale"].view(torch.uint8), rows.reshape(shape[:-1])
    assert isinstance(format, Fp8)
    scale, single = parts[format.scale].float(), () in format.scale_shapes(n, k)
    step = format.block[1] if isinstance(format, BlockFp8) else k
    by_column = (format.row_scales(pick(scale, index, single, len(shape)), slice(0, n), k) for index in stacked)
    by_group = torch.stack([torch.atleast_2d(scales)[:, ::step].expand(n, -1) for scales in by_column])
    return values, by_group.reshape(*shape[:-1], -1)


def stored_columns(parameter: Parameter, rank: int, tp_size: int, step: int) -> Tensor | None:
    """A rank's columns of a stored tensor of which each stands for ``step`` columns of the weight, the last for fewer.

    None when the rank's part does not consist of whole ones.
    """
    k = parameter.shape[-1]
    columns = torch.arange(k)
    if parameter.axis == len(parameter.shape) - 1:
        columns = Parameter((k,), 0, parameter.segments).shard(columns, rank, tp_size)
    stored = columns[::step] // step
    whole = (stored[:, None] * step + torch.arange(step)).flatten()
    return stored if torch.equal(whole[whole < k], columns) else None


def rank_parts(
    parameter: Parameter, packing: Packing, parts: tuple[Tensor, ...], rank: int, tp_size: int
) -> list[Tensor]:
    """A rank's share of the stored tensors of a weight, or of one of stacked weights, that ``parameter`` describes."""
    axis = len(parameter.shape) - 1
    if parameter.axis != axis:
        return [parameter.shard(part, rank, tp_size) for part in parts]
    columns = [None if step is None else stored_columns(parameter, rank, tp_size, step) for step in packing.columns]
    return [part if own is None else part.index_select(axis, own) for part, own in zip(parts, columns, strict=True)]
