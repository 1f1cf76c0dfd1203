"""Quantised weights as the full-precision tensors that they stand for.

The tensors of a quantised module (values, scales) become one virtual tensor under the name and with the shape that the
weight has in the full-precision checkpoint, so that families need not know of it. Which modules are quantised is told
twice, by the tensors and by the description, and both must agree.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trtllm_replayssm.builders.hf.description import Description, agreed_format
from trtllm_replayssm.builders.hf.descriptions.reading import read_descriptions
from trtllm_replayssm.builders.hf.formats.base import Format, Shape
from trtllm_replayssm.builders.hf.formats.unread import Unread
from trtllm_replayssm.builders.hf.module_names import ancestors
from trtllm_replayssm.builders.hf.ngram_tables import described_by_dtype, is_ngram_table, share_scales, table_format
from trtllm_replayssm.builders.safetensors_reader import FLOAT_DTYPES, TensorEntry
from trtllm_replayssm.errors import CheckpointError

#: Tensors beside a weight that only quantised modules have, in any format.
SCALES = (
    *("weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_shape"),
    *("weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "pre_quant_scale"),
    *("svdquant_lora_a", "svdquant_lora_b"),
)
#: ``module.part``; a parameter that is no module's weight, as fused experts are, has ``parameter_part``.
PART = re.compile(rf"(?P<module>.+)(?P<joint>[._])(?P<part>{'|'.join(sorted(SCALES, key=len, reverse=True))})")
BARE_SCALE_INV = re.compile(r"(?P<module>.+_proj)_scale_inv")
#: What becomes of quantised weights, unless a conversion keeps them.
DEQUANTISED = "are dequantised on conversion"
KEPT = "are kept where they can be"
#: Scales of a quantised KV cache, which this package does not keep quantised.
CACHE_SCALE = re.compile(r"(?P<module>.+)\.[kv]_scale")
#: Modules that stay in full precision although they are below a block that is quantised.
LEFT_PLAIN = re.compile(r"norm|conv|router|gate$|embed_tokens$|embeddings$|in_proj_(a|b|ba)$")


@dataclass(frozen=True)
class QuantisedTensor:
    """A weight ``shape`` that is stored quantised. parts: stored tensors by part. nbytes: of all parts."""

    module: str
    format: Format
    parts: dict[str, str]
    shape: Shape
    nbytes: int
    dtype: str = "F32"

    def stored(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parts that make the weight, each of which is read once."""
        return {part: read(name) for part, name in self.parts.items() if part != self.format.aside}

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """float32, computed from the parts."""
        return self.format.dequantise(self.module, self.stored(read), self.shape)


@dataclass
class QuantisedWeights:
    """weights: by the name of the full-precision tensor. refused: why a model cannot use a tensor, quantised or not, by name.
    replaced: stored tensors that nobody else may use. notes: what a user should know, one sentence each."""

    weights: dict[str, QuantisedTensor] = field(default_factory=dict)
    refused: dict[str, CheckpointError] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def find_quantised(
    path: Path, config: dict[str, Any], entries: dict[str, TensorEntry], fate: str = DEQUANTISED
) -> QuantisedWeights:
    """The quantised weights among a folder's tensors. fate: what the note about them says becomes of them.

    Raises CheckpointError, naming the module, where tensors and descriptions contradict each other; UnsupportedModelError
    for formats that are not read. What only matters if the model uses a weight is kept in ``refused``.
    """
    descriptions = read_descriptions(path, config) or described_by_dtype(config)
    found = QuantisedWeights()
    for module, (name, parts) in quantised_modules(entries).items():
        format = described_format(path, descriptions, module, parts, entries).settled(parts, entries)
        shape = format.check(module, parts, entries)
        found.weights[name] = QuantisedTensor(
            module, format, parts, shape, sum(entries[part].nbytes for part in parts.values())
        )
        found.replaced.update(parts.values())
        if isinstance(format, Unread):
            found.refused[name] = format.refusal
    found.refused |= promised(descriptions, found, entries)
    claiming = [description for description in descriptions if description.claims]
    if claiming and not found.weights:
        raise CheckpointError(
            f"{claiming[0].where} describes quantised weights ({claiming[0].name}), but {path} has none",
            "remove the description if the weights are in full precision",
        )
    if descriptions:
        cached = cache_scales(entries)
        found.replaced.update(cached)
        found.notes += notes(path, descriptions, found, cached, fate)
    return found


def quantised_modules(entries: dict[str, TensorEntry]) -> dict[str, tuple[str, dict[str, str]]]:
    """Modules with tensors that only quantised ones have: the weight's full-precision name, and the tensors by part."""
    weights: dict[str, str] = {}
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for name, entry in entries.items():
        match = PART.fullmatch(name)
        if match:
            module = match["module"]
            weights[module] = f"{module}.weight" if match["joint"] == "." else module
            parts[module][match["part"]] = name
        elif match := BARE_SCALE_INV.fullmatch(name):
            weights[match["module"]] = match["module"]
            parts[match["module"]]["weight_scale_inv"] = name
        elif name.endswith(".weight") and entry.dtype not in FLOAT_DTYPES:
            module = name.removesuffix(".weight")
            weights[module] = name
            parts[module]["weight"] = name
    for module, weight in weights.items():
        if weight in entries:
            parts[module]["weight"] = weight
    share_scales(parts)
    return {module: (weights[module], parts[module]) for module in parts}


def described_format(
    path: Path, descriptions: list[Description], module: str, parts: dict[str, str], entries: dict[str, TensorEntry]
) -> Format:
    """The format of a module that is quantised according to its tensors."""
    name = next(iter(sorted(parts.values())))
    if not descriptions:
        raise CheckpointError(
            f"{name} has dtype {entries[name].dtype} and belongs to a quantised weight, but neither config.json nor"
            f" hf_quant_config.json in {path} describes one",
            "download these files too, or use the BF16 checkpoint",
        )
    format = table_format(descriptions, module, parts, entries) if is_ngram_table(module) else None
    format = format or agreed_format(descriptions, module)
    if format is None:
        raise CheckpointError(
            f"{module} has tensors of a quantised weight ({', '.join(sorted(parts))}), but"
            f" {' and '.join(d.where for d in descriptions)} says that it is not quantised",
            "the description and the tensors belong to different checkpoints",
        )
    return format


def promised(
    descriptions: list[Description], found: QuantisedWeights, entries: dict[str, TensorEntry]
) -> dict[str, CheckpointError]:
    """Errors by name for plain weights that a table calls quantised.

    General statements are no contradiction: they speak of linear layers, and routers or embeddings may be none.
    """
    errors = {}
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        # The weight of a module, or the experts of a layer in one tensor.
        matrices = len(entry.shape) >= 2 if module != name else len(entry.shape) == 3
        if name in found.weights or entry.dtype not in FLOAT_DTYPES or not matrices:
            continue
        for description in descriptions:
            format = promise(description, module)
            if format is not None:
                errors[name] = CheckpointError(
                    f"{description.where} says that {module} is {format.label}, but {name} is {entry.dtype} without scales",
                    "the description and the tensors belong to different checkpoints",
                )
    return errors


def promise(description: Description, module: str) -> Format | None:
    """The format that a table names for a module itself, or for a block around it which does not leave it out."""
    format = next(iter(description.table.find(module)), None)
    if format is None or description.table.named(module):
        return format
    return None if LEFT_PLAIN.search(module) or description.ignored.match(module) else format


def cache_scales(entries: dict[str, TensorEntry]) -> list[str]:
    """Scales of a quantised KV cache: numbers, at most one a head, of modules that the checkpoint has."""
    named = {name: match["module"] for name in entries if (match := CACHE_SCALE.fullmatch(name))}
    present = {module for name in entries if named and name not in named for module in ancestors(name)}
    return sorted(
        name
        for name, module in named.items()
        if module in present
        and entries[name].dtype in FLOAT_DTYPES
        and sum(size > 1 for size in entries[name].shape) < 2
    )


def notes(
    path: Path, descriptions: list[Description], found: QuantisedWeights, cache_scales: list[str], fate: str
) -> list[str]:
    counts = Counter(weight.format.label for weight in found.weights.values())
    counted = ", ".join(f"{count} {label}" for label, count in counts.most_common())
    said = []
    if counts:
        said.append(f"{path} is quantised ({descriptions[0].name}): {sum(counts.values())} weights {fate}, {counted}")
    if cache_scales:
        said.append(
            f"left out {len(cache_scales)} scales of a quantised KV cache (k_scale, v_scale): the cache is not quantised"
        )
    return said
