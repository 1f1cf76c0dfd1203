"""What ``inspect`` reports of a model: layers, parameters, weight bytes, and the state of one request."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.layer_texts import layer_text
from trtllm_replayssm.network.packed import Packing
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.traffic import RecurrentBytes

#: Tokens over which the growth of caches is averaged: a multiple of every step in which they grow.
SPAN = 1 << 16
#: Of a LayerGroup, what a request takes whatever its length.
FIXED_BYTES = ("state_bytes", "copy_bytes", "ring_bytes", "conv_bytes")


@dataclass(frozen=True)
class Subject:
    """A model to report on, and the options it is stored with or is asked about.

    source: what was read, e.g. ``Hugging Face config``. architecture: ``architectures[0]`` of the Hugging Face source.
    packings: how the weights that stay quantised are stored, by name.
    """

    source: str
    architecture: str
    decoder: HybridDecoder
    replay: ReplayConfig
    dtype: str
    tp_size: int
    max_seq_len: int
    packings: dict[str, Packing] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerGroup:
    """Equal residual branches. Parameters are over all ranks; bytes are of one rank, for all branches of the group.

    active_parameters: without the experts that a token does not visit. kv_bytes_per_token: of one token of a request;
    the other bytes are of one request.
    """

    kind: str
    shape: str
    count: int
    parameters: int
    active_parameters: int
    weight_bytes: int
    state_bytes: int
    copy_bytes: int
    ring_bytes: int
    conv_bytes: int
    kv_bytes_per_token: int

    @property
    def state_bytes_per_layer(self) -> int:
        return self.state_bytes // self.count


@dataclass(frozen=True)
class StepBytes:
    """Model of the recurrent bytes that one request moves per step on one rank: ordinary engine against ReplaySSM."""

    step: str
    ordinary: float
    replay: float

    @property
    def ratio(self) -> float:
        return self.ordinary / self.replay


@dataclass(frozen=True)
class Report:
    """Everything that ``inspect`` prints.

    parameters: all of them, embedding, head and MTP included. mtp_parameters: those of the MTP part, which decoding without
    drafts does not use. active_parameters: without MTP and without the experts that a token does not visit.
    bits_per_weight: of the weights that stay quantised, by algorithm.
    """

    subject: Subject
    layers: tuple[LayerGroup, ...]
    parameters: int
    mtp_parameters: int
    active_parameters: int
    weight_bytes: int
    bits_per_weight: dict[str, float]
    kv_bytes: int
    steps: tuple[StepBytes, ...]

    def kinds(self) -> dict[str, int]:
        """Number of layers by kind."""
        counts: Counter[str] = Counter()
        for group in self.layers:
            counts[group.kind] += group.count
        return dict(counts)

    def total(self, field: str) -> int:
        """Sum of a byte field of LayerGroup."""
        return sum(getattr(group, field) for group in self.layers)

    @property
    def request_bytes(self) -> int:
        """State of one request of max_seq_len tokens."""
        return sum(map(self.total, FIXED_BYTES)) + self.kv_bytes

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; all sizes in bytes."""
        subject = self.subject
        per_request = {f: self.total(f) for f in (*FIXED_BYTES, "kv_bytes_per_token")}
        return {
            "source": subject.source,
            "architecture": subject.architecture,
            "dtype": subject.dtype,
            "tp_size": subject.tp_size,
            "max_seq_len": subject.max_seq_len,
            "replay": subject.replay.to_dict(),
            "layers": [
                group.__dict__ | {"state_bytes_per_layer": group.state_bytes_per_layer} for group in self.layers
            ],
            "parameters": self.parameters,
            "mtp_parameters": self.mtp_parameters,
            "active_parameters": self.active_parameters,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": self.bits_per_weight,
            "request": per_request | {"kv_bytes": self.kv_bytes, "bytes": self.request_bytes},
            "model_of_bytes_per_step": [step.__dict__ | {"ratio": step.ratio} for step in self.steps],
        }


def inspect_model(subject: Subject) -> Report:
    """Measures a model from its description. Raises UserError when tp_size does not divide it."""
    decoder = subject.decoder
    decoder.divided(subject.tp_size)
    places: dict[Layer, list[int]] = defaultdict(list)
    for place, layer in enumerate(decoder.layers):
        places[layer].append(place)
    groups = tuple(layer_group(subject, layer, where) for layer, where in places.items())
    stored = decoder.parameters(subject.tp_size)
    named = decoder.parameters()
    parameters = sum(parameter.elements for parameter in named.values())
    mtp = sum(parameter.elements for name, parameter in named.items() if name.startswith("mtp."))
    idle = sum(idle_parameters(layer, decoder.hidden_size) for layer in decoder.layers)
    return Report(
        subject=subject,
        layers=groups,
        parameters=parameters,
        mtp_parameters=mtp,
        active_parameters=parameters - mtp - idle,
        weight_bytes=sum(weight_bytes(name, p, subject) for name, p in stored.items()),
        bits_per_weight=bits_per_weight(stored, subject),
        kv_bytes=subject.max_seq_len * sum(group.kv_bytes_per_token for group in groups),
        steps=step_bytes(subject),
    )


def layer_group(subject: Subject, layer: Layer, places: list[int]) -> LayerGroup:
    """The group of equal layers at these places; what they keep quantised may differ."""
    decoder, hidden, count = subject.decoder, subject.decoder.hidden_size, len(places)
    own = decoder.branch(layer, decoder.streams)
    elements = sum(p.elements for p in own.values())
    pools = rank_pools(subject, layer)
    return LayerGroup(
        kind=layer.kind,
        shape=layer_text(layer),
        count=count,
        parameters=count * elements,
        active_parameters=count * (elements - idle_parameters(layer, hidden)),
        weight_bytes=sum(
            weight_bytes(f"transformer.layers.{place}.{name}", p, subject)
            for place in places
            for name, p in own.items()
        ),
        state_bytes=count * kind_bytes(pools, "state"),
        copy_bytes=count * kind_bytes(pools, "copy"),
        ring_bytes=count * kind_bytes(pools, "ring"),
        conv_bytes=count * kind_bytes(pools, "conv"),
        kv_bytes_per_token=count * kv_bytes_per_token(subject, layer),
    )


def kv_bytes_per_token(subject: Subject, layer: Layer) -> int:
    """What the caches of a layer grow by with each token, on one rank; their rows may come in larger steps."""
    empty, grown = (
        kind_bytes(rank_pools(replace(subject, max_seq_len=length), layer, drafts=False), "kv") for length in (0, SPAN)
    )
    return (grown - empty) // SPAN


def rank_pools(subject: Subject, layer: Layer, drafts: bool = True) -> list[Pool]:
    """The layer's pools on one rank; without the room for drafts when only the cost of a token is asked."""
    options = subject.replay if drafts else replace(subject.replay, max_draft_len=0)
    state_options = StateOptions(options, getattr(torch, subject.dtype), subject.max_seq_len)
    return list(layer.divided(subject.tp_size).pools(state_options).values())


def kind_bytes(pools: list[Pool], kind: str) -> int:
    """Bytes of one slot's data, without the padding to SLOT_ALIGNMENT."""
    return sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools if pool.kind == kind)


def weight_bytes(name: str, parameter: Parameter, subject: Subject) -> int:
    """Bytes of one rank's part of a parameter, scales included."""
    shape = parameter.local_shape(subject.tp_size)
    if name in subject.packings:
        layout = subject.packings[name].layout(name, shape).values()
        return sum(math.prod(stored) * dtype.itemsize for dtype, stored in layout)
    itemsize = 4 if parameter.float32 else getattr(torch, subject.dtype).itemsize
    return math.prod(shape) * itemsize


def bits_per_weight(stored: dict[str, Parameter], subject: Subject) -> dict[str, float]:
    """Mean bits of the weights that stay quantised, scales included, by algorithm; of one rank."""
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, packing in subject.packings.items():
        size[packing.quant_algo] += weight_bytes(name, stored[name], subject)
        count[packing.quant_algo] += math.prod(stored[name].local_shape(subject.tp_size))
    return {algorithm: 8 * size[algorithm] / count[algorithm] for algorithm in size}


def idle_parameters(layer: Layer, hidden_size: int) -> int:
    """Parameters of routed experts, and rows of n-gram tables, that one token does not visit."""
    if isinstance(layer, NgramEmbedding):
        return (layer.rows - len(layer.hash.primes)) * layer.full_width
    if not isinstance(layer, Moe):
        return 0
    named = layer.parameters(hidden_size).items()
    experts = sum(parameter.elements for name, parameter in named if name.startswith("experts."))
    return experts // layer.num_experts * (layer.num_experts - layer.top_k)


def step_bytes(subject: Subject) -> tuple[StepBytes, ...]:
    """Plain decode, and verify steps with all and with half of the tokens accepted."""
    pools = [pool for layer in subject.decoder.layers for pool in rank_pools(subject, layer)]
    size = RecurrentBytes.of(pools, subject.replay)
    if not size.state:
        return ()
    rows = [StepBytes("decode, 1 token", size.standard(), size.steady(subject.replay))]
    tokens = subject.replay.verify_tokens
    for accepted in sorted({tokens, (tokens + 1) // 2}, reverse=True) if tokens > 1 else ():
        name = f"verify, {tokens} tokens, {accepted} accepted"
        rows.append(StepBytes(name, size.state_per_draft(tokens), size.steady(subject.replay, tokens, accepted)))
    return tuple(rows)
