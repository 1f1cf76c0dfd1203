"""Strict accounting: every expected weight has its tensors, every tensor has its use, all shapes fit.

All of it is decided from headers, before any data is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from trtllm_replayssm.builders.families.base import Family, Source
from trtllm_replayssm.builders.hf.folder import HfFolder, listed
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.builders.safetensors_reader import FLOAT_DTYPES
from trtllm_replayssm.errors import CheckpointError

EMBEDDING = "transformer.vocab_embedding.weight"
HEAD = "lm_head.weight"


def account(folder: HfFolder, family: Family, decoder: HybridDecoder, warn: Callable[[str], None]) -> dict[str, Source]:
    """A source for every weight of the decoder, a tied head included.

    Raises CheckpointError when tensors are missing, left over, of a wrong shape, or not floating point, and for those that
    the folder refuses.
    """
    parameters, sources = decoder.parameters(), family.sources(decoder)
    if set(parameters) != set(sources):
        raise ValueError(f"sources and parameters differ: {sorted(set(parameters) ^ set(sources))}")
    used = {name for source in sources.values() for name in source.names}
    missing = sorted(used - set(folder.entries))
    if missing:
        raise CheckpointError(
            f"{folder.path} lacks {len(missing)} tensors that its config.json asks for: {listed(missing)}",
            "download the whole checkpoint again",
        )
    for name in sorted(used):
        if name in folder.refused:
            raise folder.refused[name]
        if folder.entries[name].dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{name} has dtype {folder.entries[name].dtype}, and no quantisation of it is described",
                "use the BF16 checkpoint",
            )
    for name, source in sources.items():
        check_shapes(folder, name, source, parameters[name])
    check_leftovers(folder, family, decoder, set(folder.entries) - used, sources[EMBEDDING], warn)
    return sources | {HEAD: sources.get(HEAD, sources[EMBEDDING])}


def check_shapes(folder: HfFolder, name: str, source: Source, parameter: Parameter) -> None:
    """Runs the source on tensors without data. Raises CheckpointError when its result has not the parameter's shape."""
    expected = parameter.shape
    if source.stacked:
        if parameter.axis == 0 or source.stacked * len(source.runs()[0]) != len(source.names):
            raise ValueError(f"the source of {name} cannot be stacked")
        if source.stacked != expected[0]:
            raise CheckpointError(f"{name} is made of {source.stacked} parts, but config.json asks for {expected[0]}")
        expected = expected[1:]
    checked: set[tuple[tuple[int, ...], ...]] = set()
    for run in source.runs():
        shapes = tuple(folder.entries[tensor].shape for tensor in run)
        if shapes in checked:
            continue
        checked.add(shapes)
        try:
            made = tuple(source.build([torch.empty(shape, device="meta") for shape in shapes]).shape)
        except (RuntimeError, ValueError, IndexError, TypeError):
            made = None
        if made != expected:
            found = ", ".join(f"{tensor} {list(shape)}" for tensor, shape in zip(run[:6], shapes, strict=False))
            raise CheckpointError(
                f"{found} {'does' if len(run) == 1 else 'do'} not fit config.json, which asks for {list(expected)}"
                f" in {name}",
                "config.json and the weights belong to different models, or one of them was edited",
            )


def check_leftovers(
    folder: HfFolder,
    family: Family,
    decoder: HybridDecoder,
    leftovers: set[str],
    embedding: Source,
    warn: Callable[[str], None],
) -> None:
    """Raises CheckpointError for tensors that nothing uses and that the family does not drop on purpose."""
    dropped: dict[str, list[str]] = defaultdict(list)
    unknown = []
    for name in sorted(leftovers):
        reason = family.dropped(name)
        if reason is None and decoder.tie_embeddings and (name == HEAD or name.endswith(f".{HEAD}")):
            check_tied_head(folder, name, embedding)
            reason = "the head is tied to the embedding, and this copy is equal"
        if reason is None:
            unknown.append(name)
        else:
            dropped[reason].append(name)
    if unknown:
        raise CheckpointError(
            f"{folder.path} holds {len(unknown)} tensors that this model does not use: {listed(unknown)}",
            "leaving them out could change the output; ask for support of this checkpoint",
        )
    for reason, names in dropped.items():
        warn(f"left out {len(names)} tensors ({reason}): {listed(names)}")


def check_tied_head(folder: HfFolder, name: str, embedding: Source) -> None:
    """Raises CheckpointError when a tied model brings a head that is not its embedding."""
    first = embedding.names[0]
    if name in folder.quantised:
        raise CheckpointError(
            f"config.json ties the head to the embedding, but {name} is stored for itself, quantised",
            "set tie_word_embeddings to what the model was trained with",
        )
    alike = (folder.entries[name].dtype, folder.entries[name].shape) == (
        folder.entries[first].dtype,
        folder.entries[first].shape,
    )
    if not alike or not torch.equal(folder.tensor(name), folder.tensor(first)):
        raise CheckpointError(
            f"config.json ties the head to the embedding, but {name} differs from {first}",
            "set tie_word_embeddings to what the model was trained with",
        )
