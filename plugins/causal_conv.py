"""``replayssm::causal_conv``: depthwise causal convolution, bias and SiLU, over a ring that rolls back with the cursor.

| tensor    | shape                        | dtype      | direction                                                  |
|-----------|------------------------------|------------|------------------------------------------------------------|
| x         | [rows, T, channels]          | activation | in                                                         |
| weight    | [channels, kernel]           | any float  | in; the last tap multiplies the newest token               |
| bias      | [channels]                   | any float  | in, optional                                               |
| step      | [rows, STEP_WORDS]           | int32      | in; cursors.Step                                           |
| conv_ring | [slots, conv_rows, channels] | activation | in and out, one address; token p in row ``p % conv_rows``  |
| y         | [rows, T, channels]          | activation | out; zero for padding rows and tokens                      |

Reads tokens ``committed - kernel + 1 ... committed - 1`` from the ring (zero where negative) and writes the step's tokens
behind them. ``conv_rows = kernel - 1 + verify_tokens``, so no rejected token can overwrite one that is still needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class CausalConvAttributes:
    """channels: convolved channels. kernel: taps. conv_rows: rows of the ring. silu: apply SiLU to the result."""

    channels: int
    kernel: int
    conv_rows: int
    silu: bool = True

    @classmethod
    def create(cls, channels: int, kernel: int, replay: ReplayConfig) -> CausalConvAttributes:
        return cls(channels, kernel, kernel - 1 + replay.verify_tokens)

    def pools(self, activation: torch.dtype) -> dict[str, Pool]:
        return {"conv_ring": Pool((self.conv_rows, self.channels), activation, "conv")}
