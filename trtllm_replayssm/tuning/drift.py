"""Errors of a recurrent layer over a long request: its kernel, step by step as an engine runs it, against float64.

The request's activations are random, the decays the model's own where its weights are at hand. Outputs are compared without
the skip D x of Mamba-2, which has no error and would hide that of what is read from the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from trtllm_replayssm.plugins.cursors import RowMode, Step
from trtllm_replayssm.plugins.implementation import Implementation, reference
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.quantised_state import stored_states
from trtllm_replayssm.tuning import layer
from trtllm_replayssm.tuning.layer import Attributes, Dtypes, signature, step_info

#: Log decay of a token where no weights are at hand: a state that remembers about a thousand tokens, in which errors add up.
WEAK_DECAY = -0.001
#: Standard deviation of the logits of decays and time steps around their biases.
GATE_SPREAD = 0.25
#: Parts of a request whose errors are told apart.
PARTS = 4


@dataclass(frozen=True)
class Drift:
    """Relative errors: of the outputs of the last and the first quarter of a request, and of the state behind it."""

    last: float
    first: float
    state: float


def weak_weights(attributes: Attributes) -> tuple[Tensor, ...]:
    """Weights with which every head and channel forgets as slowly as WEAK_DECAY."""
    rates, gates, *skips = signature(attributes).weights
    bound = attributes.lower_bound if isinstance(attributes, KdaAttributes) else None
    logit = math.log(math.expm1(-WEAK_DECAY)) if bound is None else -math.log(bound / WEAK_DECAY - 1)
    return torch.zeros(rates), torch.full((gates,), logit), *map(torch.zeros, skips)


class Request:
    """A request of ``tokens`` tokens, rounded up to whole steps of ``step`` tokens, and what float64 makes of it.

    rows: of a batch's steps; the request is the first, the others are padding, so that the kernel is the one of that batch.
    """

    def __init__(
        self,
        attributes: Attributes,
        weights: tuple[Tensor, ...],
        activation: torch.dtype,
        tokens: int,
        step: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.tokens, self.step, self.rows, self.device = -(-tokens // step) * step, step, rows, device
        self.kind, widths = signature(attributes).kind, signature(attributes).inputs
        generator = torch.Generator(device).manual_seed(0)

        def normal(width: int) -> Tensor:
            # Padding rows find something behind the last token.
            shape = (self.tokens + rows * step, width)
            return torch.randn(shape, generator=generator, device=device)

        packed, gates, *betas = map(normal, widths)
        self.inputs = [x.to(activation) for x in (silu(packed), gates * GATE_SPREAD, *betas)]
        self.weights = [w.to(device) for w in weights]
        if isinstance(attributes, Mamba2Attributes):
            self.weights[2] = torch.zeros_like(self.weights[2])
        self.outputs, self.state = self.truth(attributes)

    def truth(self, attributes: Attributes) -> tuple[Tensor, Tensor]:
        """Outputs ``[tokens, channels]`` and final state of one pass in float64."""
        plain: Any = replace(attributes, window=1, ring_rows=1, read_dtype="same")
        pools = {name: pool.allocate(1, self.device) for name, pool in plain.pools(*(torch.float64,) * 3).items()}
        # Gates keep float32 rings, which a single pass does not use.
        inputs = (x[None, : self.tokens].double() for x in self.inputs)
        plan = step_info(1, [0], self.tokens, 1, self.device, folded=0, mode=RowMode.ABSORB)
        run: Any = getattr(reference(), self.kind)
        outputs = run(plain, *inputs, *(w.double() for w in self.weights), plan, pools)
        return outputs[0], pools["state"][0]

    def plans(self, window: int) -> Tensor:
        """int32 ``[steps, STEP_WORDS]`` of the request's steps; the last folds everything, which leaves the final state."""
        steps = self.tokens // self.step
        # A ring of verify steps is empty once, before the first; a fold leaves the tokens of its own step in it.
        started = [0] if self.step > 1 else []
        histories = list(islice(chain(started, cycle(layer.cycle(window, self.step))), steps))
        folded = torch.arange(steps, dtype=torch.int32) * self.step - torch.tensor(histories, dtype=torch.int32)
        plans = step_info(window, histories, self.step, steps, folded=folded)
        plans[-1, Step.FOLD_TO] = self.tokens
        # The rows of these plans are steps of one row each.
        plans[:, Step.SLOT] = plans[:, Step.TURN] = 0
        return plans

    def drift(self, attributes: Attributes, dtypes: Dtypes, plugins: Implementation) -> Drift:
        """Errors of ``plugins`` at work with these attributes and dtypes."""
        pools = {name: pool.allocate(1, self.device) for name, pool in attributes.pools(*dtypes).items()}
        plans = self.plans(attributes.window)
        infos = torch.zeros(len(plans), self.rows, plans.shape[1], dtype=torch.int32)
        infos[:, :, Step.SLOT] = -1
        infos[:, 0] = plans
        infos, run = infos.to(self.device), getattr(plugins, self.kind)
        outputs = torch.empty_like(self.outputs)
        for i in range(len(plans)):
            at = i * self.step
            inputs = (x[at : at + self.rows * self.step].unflatten(0, (self.rows, self.step)) for x in self.inputs)
            outputs[at : at + self.step] = run(attributes, *inputs, *self.weights, infos[i], pools)[0]
        parts = [relative(x, y) for x, y in zip(outputs.chunk(PARTS), self.outputs.chunk(PARTS))]
        state = stored_states(pools, torch.zeros(1, dtype=torch.long, device=self.device))[0]
        return Drift(parts[-1], parts[0], relative(state.double(), self.state))


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
