"""What the recurrent mixers share: a causal convolution in front of a recurrence, both with state that rolls back."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from trtllm_replayssm.builders.layers.base import Layer, StateOptions
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.quantised_state import SCALE
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.replay import ReplayConfig


class Recurrent(Layer):
    """A mixer whose plugin layer keeps the pools ``state_names`` and those of the read copy.

    conv_kernel: taps of the convolution. feeds_back: what is read from the state goes into its updates, as in the delta rule.
    """

    conv_kernel: int
    state_names: ClassVar[tuple[str, ...]]
    feeds_back: ClassVar[bool] = True

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
        self.check_state(options.replay)
        attributes = self.attributes(options.replay)
        ring = options.ring_dtype(getattr(attributes, "derived_fold", False))
        recurrent = attributes.pools(options.activation, options.state_dtype, ring)
        return recurrent | self.conv_attributes(options.replay).pools(options.activation)

    def check_state(self, replay: ReplayConfig) -> None:
        """Raises UserError for a state whose errors would feed back into the layer's updates."""
        if not self.feeds_back:
            return
        if replay.state_rounding == "stochastic":
            raise UserError(
                f"state_rounding stochastic is for Mamba-2 layers; this model has {self.kind} layers",
                "leave out --state_rounding: a longer --replay_window rounds less often",
            )
        if replay.quantised_state and not replay.force_quantised_state:
            raise UserError(
                f"state_dtype {replay.state_dtype} feeds its rounding back into the updates of {self.kind} layers",
                "use --state_dtype float16 or a --state_read_dtype, or force it with --force_quantised_state",
            )

    def convolved(self, net: Network, name: str, x: Tensor, replay: ReplayConfig, bias: bool = False) -> Tensor:
        """x ``[rows, T, conv_channels]`` after convolution and SiLU."""
        weight = net.weight(f"{name}.conv1d.weight")
        taps = net.weight(f"{name}.conv1d.bias") if bias else None
        return net.causal_conv(self.conv_attributes(replay), x, weight, taps, net.pool(f"{name}.conv_ring"))

    def state(self, net: Network, name: str, replay: ReplayConfig) -> dict[str, Tensor]:
        """The plugin layer's pools by their short names."""
        scales = (SCALE,) if replay.quantised_state else ()
        names = (*self.state_names, *scales, *copy_names(replay.state_read_dtype))
        return {pool: net.pool(f"{name}.{pool}") for pool in names}
