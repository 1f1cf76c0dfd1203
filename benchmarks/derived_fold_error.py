"""Error of ``--replay_fold derived`` against ``exact`` for delta-rule layers, in seconds on a CPU.

One request is decoded in verify steps of four tokens, all kept, at window 16, with activations that bfloat16 holds exactly.
Two errors are printed, both relative norms against the same recurrence in float64: of the outputs over the last quarter of
the run, and of the state after it. ``exact`` replays raw inputs, so its rings lose nothing and what remains is float32;
``derived`` adds up stored updates u, and the rounding of each stays in the state until gates and erasures forget it.

    python benchmarks/derived_fold_error.py [--tokens 1024] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.plugins.reference.delta_rule import gated_delta, kda
from trtllm_replayssm.replay import Fold, ReplayConfig

KEY_HEADS, HEADS, DIM, STEP, WINDOW = 2, 4, 64, 4, 16
#: Mean log decay of a token: a state that remembers about a thousand tokens, a hundred, or ten.
DECAYS = {"weak": -0.001, "medium": -0.01, "strong": -0.1}
#: Fold and dtype of the rings' v or u.
VARIANTS: tuple[tuple[Fold, torch.dtype], ...] = (
    ("exact", torch.bfloat16),
    ("derived", torch.float32),
    ("derived", torch.float16),
    ("derived", torch.bfloat16),
)


class Request:
    """One request of a delta-rule layer: random activations, and the layer run over them."""

    def __init__(self, kind: str, decay: float, tokens: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.kind = kind
        self.key_heads = HEADS if kind == "kda" else KEY_HEADS
        decays = HEADS * DIM if kind == "kda" else HEADS

        def normal(width: int) -> Tensor:
            return torch.randn(1, tokens, width, generator=random).bfloat16().double()

        self.qkv = silu(normal((2 * self.key_heads + HEADS) * DIM)).bfloat16().double()
        self.decay, self.b = normal(decays) / 4, normal(HEADS)
        self.A_log = torch.zeros(HEADS)
        # The inverse of softplus, so that the mean gate is near the wanted decay.
        self.dt_bias = torch.full((decays,), math.log(math.expm1(-decay)))

    def attributes(self, fold: Fold) -> Any:
        replay = ReplayConfig(window=WINDOW, max_draft_len=STEP - 1, fold=fold)
        sizes: dict[str, Any] = {"key_dim": DIM, "value_dim": DIM, "window": WINDOW, "ring_rows": replay.ring_rows}
        derived = fold == "derived"
        if self.kind == "kda":
            return KdaAttributes(HEADS, derived_fold=derived, **sizes)
        return GatedDeltaAttributes(KEY_HEADS, HEADS, derived_fold=derived, **sizes)

    def run(self, attributes: Any, pools: dict[str, Tensor], dtype: torch.dtype, step: int) -> tuple[Tensor, Tensor]:
        """Outputs ``[tokens, HEADS * DIM]`` and the state after the last token, with steps of ``step`` tokens."""
        cursors, outputs = torch.zeros(1, CURSOR_WORDS, dtype=torch.int32), []
        layer = kda if self.kind == "kda" else gated_delta
        total = self.qkv.shape[1]
        for start in range(0, total, step):
            # The last step folds itself and the ring, so that the checkpoint is the state after the last token.
            mode = RowMode.ABSORB if start + step >= total else RowMode.DECODE
            row = torch.zeros(1, dtype=torch.int32)
            plan = advance(AdvanceAttributes(WINDOW), cursors, row, row + step, row + int(mode), step)
            qkv, decay, b = (value[:, start : start + step].to(dtype) for value in (self.qkv, self.decay, self.b))
            outputs.append(layer(attributes, qkv, decay, b, self.A_log, self.dt_bias, plan, pools)[0])
            cursors[0, Cursor.COMMITTED] += step
        return torch.cat(outputs).double(), pools["state"][0].double()

    def replayed(self, fold: Fold, ring: torch.dtype) -> tuple[Tensor, Tensor]:
        """As an engine runs it: float32 state, bfloat16 keys, v or u in the dtype ``ring``."""
        attributes = self.attributes(fold)
        described = attributes.pools(torch.bfloat16, torch.float32, ring)
        return self.run(attributes, {name: p.allocate(1) for name, p in described.items()}, torch.float32, STEP)

    def truth(self) -> tuple[Tensor, Tensor]:
        """One pass in float64."""
        attributes = self.attributes("exact")
        described = attributes.pools(torch.float64, torch.float64, torch.float64)
        pools = {name: p.allocate(1).double() for name, p in described.items()}
        return self.run(attributes, pools, torch.float64, self.qkv.shape[1])


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="error of derived folds against exact folds")
    parser.add_argument("--tokens", type=int, default=1024, help=f"length of the request, a multiple of {STEP}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tokens < STEP or options.tokens % STEP:
        parser.error(f"--tokens must be a positive multiple of {STEP}")
    torch.set_num_threads(1)
    print(f"{options.tokens} tokens, window {WINDOW}, {HEADS} heads of {DIM} x {DIM}, relative errors against float64")
    print(f"{'layer':<12} {'decay':<15} {'fold':<8} {'ring v or u':<12} {'outputs':>9} {'state':>9}")
    for kind in ("gated_delta", "kda"):
        for name, decay in DECAYS.items():
            request = Request(kind, decay, options.tokens, options.seed)
            outputs, state = request.truth()
            for fold, ring in VARIANTS:
                answered, folded = request.replayed(fold, ring)
                last = options.tokens // 4
                errors = f"{relative(answered[-last:], outputs[-last:]):9.1e} {relative(folded, state):9.1e}"
                ring_name = str(ring).removeprefix("torch.")
                print(f"{kind:<12} {f'{name} ({decay})':<15} {fold:<8} {ring_name:<12} {errors}", flush=True)


if __name__ == "__main__":
    main()
