"""What every layer offers, and the registry by which a checkpoint's config.json names layer kinds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from trtllm_replayssm.builders.described import Described
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.network.base import Network, Rope, Tensor
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class StateOptions:
    """What the pools of a layer depend on besides its sizes.

    activation: dtype of activations. max_seq_len: positions of the KV cache.
    """

    replay: ReplayConfig
    activation: torch.dtype
    max_seq_len: int

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.replay.state_dtype == "fp8" else getattr(torch, self.replay.state_dtype)

    def ring_dtype(self, derived: bool = False) -> torch.dtype:
        """dtype of the ring's activations; ``derived`` asks for stored updates u rather than raw inputs."""
        if self.replay.ring_dtype != "auto":
            return getattr(torch, self.replay.ring_dtype)
        return torch.float16 if derived and self.activation.itemsize == 2 else self.activation


@dataclass(frozen=True)
class Layer(Described, ABC):
    """One residual branch: ``x + output_scale * layer(input_scale * norm(x))``.

    norm_after: the norm stands behind the layer, ``x + norm(output_scale * layer(input_scale * x))``.
    """

    norm_after: bool = field(default=False, kw_only=True)
    input_scale: float = field(default=1.0, kw_only=True)
    output_scale: float = field(default=1.0, kw_only=True)

    @abstractmethod
    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """The layer's weights over all ranks, by name."""

    @abstractmethod
    def divided(self, tp_size: int) -> Layer:
        """The layer as one rank sees it. Raises UserError when heads or groups would be torn apart."""

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        """Per-slot state of this (divided) layer, by name."""
        return {}

    @abstractmethod
    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        """The branch's output ``[rows, T, hidden]``, summed over the ranks.

        name: prefix of the layer's weights and pools. x: input of the branch ``[rows, T, hidden]``.
        """

    def scaled(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        """``forward`` between the branch's scales."""
        return net.scale(self.forward(net, name, net.scale(x, self.input_scale), replay), self.output_scale)

    def parts(self, name: str) -> Iterator[tuple[str, Layer]]:
        """The layers that hold weights and state, with their prefixes: the layer itself, unless it joins others."""
        yield name, self


@dataclass(frozen=True)
class StreamLayer(Layer):
    """A branch between hyper-connections that reads the tokens and all residual streams, and adds to all of them."""

    @abstractmethod
    def added(self, net: Network, name: str, streams: Tensor, token_ids: Tensor, replay: ReplayConfig) -> Tensor:
        """What is added to the streams ``[rows, T, count * hidden]``. token_ids: int32 ``[rows, T]``; name: as in forward."""

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        raise TypeError(f"{self.kind} layers need residual streams")


def to_dict(data: Any) -> Any:
    """A layer or one of its parts as JSON values; infinities become the strings ``inf`` and ``-inf``."""
    if is_dataclass(data) and not isinstance(data, type):
        kind = {"kind": data.kind} if isinstance(data, Described) else {}
        return kind | {f.name: to_dict(getattr(data, f.name)) for f in fields(data)}
    if isinstance(data, tuple | list):
        return [to_dict(item) for item in data]
    if isinstance(data, float) and math.isinf(data):
        return str(data)
    return data


def layer_from_dict(data: dict[str, Any]) -> Any:
    """The layer, or other part, that ``to_dict`` wrote.

    Raises KeyError without a kind, ValueError for an unknown one, TypeError for unknown fields.
    """
    described = {key: value_from_json(value) for key, value in data.items() if key != "kind"}
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in Described.kinds:
        raise ValueError(f"it names a layer {kind!r}, which is not known")
    return Described.kinds[kind](**described)


def value_from_json(value: Any) -> Any:
    """A field of a layer: nested parts carry their kind, all but Rope."""
    if isinstance(value, list):
        return tuple(value_from_json(item) for item in value)
    if isinstance(value, dict):
        return layer_from_dict(value) if "kind" in value else Rope(**value)
    return float(value) if value in ("inf", "-inf") else value
