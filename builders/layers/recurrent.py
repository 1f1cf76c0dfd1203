"""What the recurrent mixers share: a causal convolution in front of a recurrence, both with state that rolls back."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.replay import ReplayConfig


class Recurrent(Layer):
    """A mixer whose plugin layer keeps the pools ``state_names`` and those of the read copy.

    conv_kernel: taps of the convolution.
    """

    conv_kernel: int
    state_names: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Channels that pass through the convolution."""

    @abstractmethod
    def attributes(self, replay: ReplayConfig) -> Mamba2Attributes | GatedDeltaAttributes | KdaAttributes:
        """Attributes of the plugin layer."""

    def conv_attributes(self, replay: ReplayConfig) -> CausalConvAttributes:
        return CausalConvAttributes.create(self.conv_channels, self.conv_kernel, replay)

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        attributes = self.attributes(options.replay)
        ring = options.ring_dtype(getattr(attributes, "derived_fold", False))
        recurrent = attributes.pools(options.activation, options.state_dtype, ring)
        return recurrent | self.conv_attributes(options.replay).pools(options.activation)

    def convolved(self, net: Network, name: str, x: Tensor, replay: ReplayConfig, bias: bool = False) -> Tensor:
        """x ``[rows, T, conv_channels]`` after convolution and SiLU."""
        weight = net.weight(f"{name}.conv1d.weight")
        taps = net.weight(f"{name}.conv1d.bias") if bias else None
        return net.causal_conv(self.conv_attributes(replay), x, weight, taps, net.pool(f"{name}.conv_ring"))

    def state(self, net: Network, name: str, replay: ReplayConfig) -> dict[str, Tensor]:
        """The plugin layer's pools by their short names."""
        return {pool: net.pool(f"{name}.{pool}") for pool in (*self.state_names, *copy_names(replay.state_read_dtype))}
