"""The tensors of one layer in a benchmark, and what the float64 reference makes of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, DeltaModel, Mamba2Model
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.reference import delta_rule, mamba2
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.plugins.reference.read_copy import write_copy
from trtllm_replayssm.tuning.layer import FOLDED, signature

#: Triton's interpreter runs the peers' Triton kernels without a GPU, for checks; it mishandles 16-bit operands of products.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ACTIVATION = torch.float32 if INTERPRETED else torch.bfloat16
#: By kind of layer: the function that runs a step.
REFERENCES: dict[str, Any] = {"mamba2": mamba2.mamba2, "gated_delta": delta_rule.gated_delta, "kda": delta_rule.kda}


@dataclass
class Problem:
    """Inputs of ``steps`` steps of one layer, and its state before them.

    inputs: activations of all steps ``[steps, batch, T, channels]``, in the order of the plugin's contract.
    weights: float32, exact in 16 bits, in the order of the contract. state: ``[batch, heads, ...]``.
    """

    case: Case
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    state: Tensor

    @classmethod
    def random(cls, case: Case, steps: int = 1, seed: int | None = None) -> Problem:
        generator = torch.Generator(DEVICE)
        generator.manual_seed(torch.seed() if seed is None else seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=ACTIVATION)

        def weight(count: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            drawn = torch.randn(count, generator=generator, device=DEVICE) * scale + shift
            return drawn.bfloat16().float()

        sizes, leading = signature(case.attributes), (steps, case.batch, case.tokens)
        inputs = [normal(*leading, channels) for channels in sizes.inputs]
        rates, gates, *skips = sizes.weights
        weights: tuple[Tensor, ...]
        if sizes.kind == "mamba2":
            weights = weight(rates).abs(), weight(gates, shift=-2.0), *map(weight, skips)
        else:
            inputs[1] -= 2
            weights = weight(rates).abs(), weight(gates, scale=0.3)
        described = case.attributes.pools(ACTIVATION, case.state, ACTIVATION)["state"]
        state = torch.empty(case.batch, *described.shape, dtype=case.state, device=DEVICE)
        return cls(case, tuple(inputs), weights, state.normal_(std=0.1, generator=generator))

    def reference(self, accepted: Sequence[int]) -> Tensor:
        """Outputs ``[steps, batch, T, channels]`` in float64 when ``accepted[i]`` tokens of step i are kept."""
        case, rows = self.case, self.case.batch
        attributes: Any = case.attributes
        described = attributes.pools(torch.float64, torch.float64, torch.float64)
        pools = {name: pool.allocate(rows, DEVICE) for name, pool in described.items()}
        pools |= {name: pools[name].double() for name, pool in described.items() if pool.kind != "copy"}
        pools["state"].copy_(self.state)
        weights, run = [w.double() for w in self.weights], REFERENCES[case.kind]
        cursors = torch.full((rows, CURSOR_WORDS), FOLDED, dtype=torch.int32, device=DEVICE)
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        write_copy(pools, slots.long())
        lengths = torch.full_like(slots, case.tokens)
        modes = torch.full_like(slots, int(RowMode.ABSORB if case.prefills else RowMode.DECODE))
        outputs = []
        for i, kept in enumerate(accepted):
            plan = advance(AdvanceAttributes(case.window), cursors, slots, lengths, modes, case.tokens)
            outputs.append(run(attributes, *(x[i].double() for x in self.inputs), *weights, plan, pools))
            cursors[:, Cursor.COMMITTED] += kept
        return torch.stack(outputs)

    # ---- parts of the packed activations, as other projects take them ------------------------------------------------

    def split(self, step: int) -> tuple[Tensor, ...]:
        """Contiguous x, B, C ``[batch, T, heads, channels]`` of a Mamba-2 layer, or q, k, v of a delta-rule layer."""
        s, packed = self.case.shape, self.inputs[0][step]
        if isinstance(s, Mamba2Model):
            counts, dims = (s.heads, s.groups, s.groups), (s.head_dim, s.state_size, s.state_size)
        else:
            counts, dims = (s.key_heads, s.key_heads, s.value_heads), (s.dim,) * 3
        parts = packed.split([n * d for n, d in zip(counts, dims)], -1)
        return tuple(part.unflatten(-1, (n, -1)).contiguous() for part, n in zip(parts, counts))

    def gates(self, step: int) -> tuple[Tensor, Tensor]:
        """Finished log decays and betas of a delta-rule layer, float32."""
        s = self.case.shape
        assert isinstance(s, DeltaModel)
        packed = [x[step].float() for x in self.inputs]
        make: Any = delta_rule.kda_tokens if s.per_channel else delta_rule.gated_delta_tokens
        _, tokens = make(self.case.attributes, *packed, *self.weights, torch.float32)
        return tokens["g"].contiguous(), tokens["beta"].contiguous()
