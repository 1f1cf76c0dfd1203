"""Layers that read the same input and are added up, such as Mamba-2 and attention side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class SideBySide(Layer):
    """``sum_i output_scale_i * layer_i(input_scale_i * x)``; the layers differ in kind, which is the prefix of their names."""

    kind = "side_by_side"

    layers: tuple[Layer, ...]

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        return {f"{layer.kind}.{n}": p for layer in self.layers for n, p in layer.parameters(hidden_size).items()}

    def divided(self, tp_size: int) -> SideBySide:
        return replace(self, layers=tuple(layer.divided(tp_size) for layer in self.layers))

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        return {f"{layer.kind}.{n}": pool for layer in self.layers for n, pool in layer.pools(options).items()}

    def parts(self, name: str) -> Iterator[tuple[str, Layer]]:
        for layer in self.layers:
            yield from layer.parts(f"{name}.{layer.kind}")

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        return reduce(net.add, (layer.scaled(net, f"{name}.{layer.kind}", x, replay) for layer in self.layers))
