"""What a plugin layer is to a network, and the form that stands in for it where TensorRT has no plugin layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor


@dataclass(frozen=True)
class PluginOutput:
    """One output of a plugin layer.

    shape: DYNAMIC (-1) for rows and T. alias: name of the input that is the same memory (a state pool), None for a tensor
    of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    alias: str | None = None


class PluginLayer(Protocol):
    """Adds a plugin layer to the network that ``emitter`` writes.

    with_advance: whether it also makes ``advance``; otherwise its result is an input of the network.

    kind: name of the layer in the namespace ``replayssm``. attributes: its attributes dataclass. inputs: by the names of
    the contract and in its order; an absent optional input is left out. Returns one tensor per output.
    """

    with_advance: bool

    def __call__(
        self,
        emitter: Emitter,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Tensor],
        outputs: tuple[PluginOutput, ...],
    ) -> tuple[Tensor, ...]: ...


class CutPlugins:
    """Cuts a network open at its plugin layers, so that a TensorRT without plugin layers can build all the rest.

    What a plugin layer computes becomes an input ``cut/<scope>/<kind>/<output>`` of the network, of the declared shape and
    dtype; what it reads from other layers becomes an output ``cut/<scope>/<kind>/<input>``; state passes unchanged. Weights
    and network inputs, which other layers do not compute, are left alone.
    """

    with_advance = False

    def __call__(
        self,
        emitter: Emitter,
        kind: str,
        attributes: Any,
        inputs: Mapping[str, Tensor],
        outputs: tuple[PluginOutput, ...],
    ) -> tuple[Tensor, ...]:
        prefix = f"cut/{emitter.scope}/{kind}"
        for name, tensor in inputs.items():
            if not (tensor.is_network_input or tensor.is_network_output or emitter.is_constant(tensor)):
                emitter.mark_output(tensor, f"{prefix}/{name}")
        return tuple(self.stand_in(emitter, prefix, inputs, output) for output in outputs)

    @staticmethod
    def stand_in(emitter: Emitter, prefix: str, inputs: Mapping[str, Tensor], output: PluginOutput) -> Tensor:
        if output.alias is not None:
            state = inputs[output.alias]
            return emitter.added(emitter.network.add_identity(state), "identity", state)
        return emitter.input(f"{prefix}/{output.name}", output.dtype, output.shape)
