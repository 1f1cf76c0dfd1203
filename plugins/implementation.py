"""Which code runs the plugin contracts: the plain reference, or the CUDA kernels. Both have the same functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.quantised_state import SCALE

PluginImpl = Literal["auto", "reference", "cuda"]


@dataclass(frozen=True)
class Implementation:
    """The plugin functions of one kind; their signatures are those of ``plugins/reference``."""

    name: str
    advance: Callable[..., Tensor]
    causal_conv: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    gated_delta: Callable[..., Tensor]
    kda: Callable[..., Tensor]
    materialise: Callable[..., None]


def implementation(choice: PluginImpl, device: torch.device) -> Implementation:
    """The implementation that ``choice`` means on ``device``; ``auto`` is ``cuda`` where there is a CUDA device.

    Raises EngineError for a choice that is not known or that the device cannot run.
    """
    if choice not in ("auto", "reference", "cuda"):
        raise EngineError(f"plugin_impl {choice!r} is not known", "use auto, reference or cuda")
    if choice == "cuda" and device.type != "cuda":
        raise EngineError(f"plugin_impl cuda is not available on {device}", "use auto or reference")
    return reference() if choice == "reference" or device.type != "cuda" else cuda()


@lru_cache
def reference() -> Implementation:
    from trtllm_replayssm.plugins.reference import advance, conv, delta_rule, mamba2, materialise

    return Implementation(
        "reference",
        advance.advance,
        conv.causal_conv,
        mamba2.mamba2,
        delta_rule.gated_delta,
        delta_rule.kda,
        materialise.materialise,
    )


def without_quantised_state(layer: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run``, whose last argument are pools; raises EngineError where their state is quantised, which it cannot read."""

    def checked(*arguments: Any) -> Tensor:
        if SCALE in arguments[-1]:
            raise EngineError(
                f"the CUDA kernels of {layer} layers have no quantised states",
                "use --plugin_impl reference, or build with --state_dtype float16",
            )
        return run(*arguments)

    return checked


@lru_cache
def cuda() -> Implementation:
    from trtllm_replayssm.plugins.device import advance, causal_conv, gated_delta, kda, mamba2, materialise

    return Implementation(
        "cuda",
        advance.advance,
        causal_conv.causal_conv,
        mamba2.mamba2,
        without_quantised_state("gated_delta", gated_delta.gated_delta),
        without_quantised_state("kda", kda.kda),
        materialise.materialise,
    )
