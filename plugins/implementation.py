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


def by_state(plain: Callable[..., Any], quantised: Callable[..., Any], pools_at: int = -1) -> Callable[..., Any]:
    """``plain``, or ``quantised`` where the pools, an argument of both, have a quantised state (plugins/quantised_state.py)."""

    def run(*arguments: Any) -> Any:
        return (quantised if SCALE in arguments[pools_at] else plain)(*arguments)

    return run


def without_quantised_state(layer: str) -> Callable[..., Any]:
    """Stands for kernels that do not exist; raises EngineError when it is called."""

    def refuse(*_: Any) -> Any:
        raise EngineError(
            f"the CUDA kernels of {layer} layers have no quantised states",
            "use --plugin_impl reference, or build with --state_dtype float16",
        )

    return refuse


@lru_cache
def cuda() -> Implementation:
    from trtllm_replayssm.plugins.device import advance, causal_conv, gated_delta, kda, mamba2, materialise
    from trtllm_replayssm.plugins.device import mamba2_quantised as quantised

    return Implementation(
        "cuda",
        advance.advance,
        causal_conv.causal_conv,
        mamba2.mamba2,
        by_state(gated_delta.gated_delta, without_quantised_state("gated_delta")),
        by_state(kda.kda, without_quantised_state("kda")),
        # Only Mamba-2 layers come as far as a snapshot with such a state.
        by_state(materialise.materialise, quantised.materialise, pools_at=1),
    )
