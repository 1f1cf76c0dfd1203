"""``replayssm::kda``: Kimi Delta Attention, the delta rule with one decay per key channel, with ReplaySSM state.

| tensor    | shape                          | dtype      | direction                                             |
|-----------|--------------------------------|------------|-------------------------------------------------------|
| qkv       | [rows, T, 2*H*K + H*V]         | activation | in; q, k, v after convolution and SiLU                |
| f         | [rows, T, H*K]                 | activation | in; decay logits                                      |
| b         | [rows, T, H]                   | activation | in; beta logits                                       |
| A_log     | [H]                            | float32    | in                                                    |
| dt_bias   | [H*K]                          | float32    | in                                                    |
| step      | [rows, STEP_WORDS]             | int32      | in; cursors.Step                                      |
| state     | [slots, H, V, K]               | state      | in and out, one address; the checkpoint               |
| ring_k    | [slots, H, ring_rows, K]       | activation | in and out, one address; k before normalisation       |
| ring_v    | [slots, H, ring_rows, V]       | ring       | in and out; v (fold exact) or u (fold derived)        |
| ring_g    | [slots, H, ring_rows, K]       | float32    | in and out, one address; log decay g                  |
| ring_beta | [slots, H, ring_rows]          | float32    | in and out, one address; beta                         |
| read_*    | [slots, H, ...], of [H, V, K]  | raw bits   | in and out; none where read_dtype is same             |
| o         | [rows, T, H*V]                 | activation | out; zero for padding rows and tokens                 |

As ``gated_delta`` with ``S = S diag(exp(g))`` and one of two gates (Kimi Linear, arXiv 2510.26692):

    softplus:  g = -exp(A_log) softplus(f + dt_bias)
    bounded:   g = lower_bound sigmoid(exp(A_log) (f + dt_bias)),   lower_bound < 0

``read_dtype`` adds a narrow copy of the state for outputs (plugins/read_copy.py); only an exact fold may have one.
A state of 8 bits has a pool ``state_scale`` [slots, H, V] behind these (plugins/quantised_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.quantised_state import scale_pools
from trtllm_replayssm.plugins.read_copy import copy_pools
from trtllm_replayssm.replay import ReadDtype


@dataclass(frozen=True)
class KdaAttributes:
    """num_heads H, key_dim K, value_dim V; lower_bound selects the bounded gate, None the softplus gate."""

    num_heads: int
    key_dim: int
    value_dim: int
    window: int
    ring_rows: int
    lower_bound: float | None = None
    derived_fold: bool = False
    read_dtype: ReadDtype = "same"

    def pools(self, activation: torch.dtype, state: torch.dtype, ring: torch.dtype) -> dict[str, Pool]:
        h, k, v, r = self.num_heads, self.key_dim, self.value_dim, self.ring_rows
        pools = {
            "state": Pool((h, v, k), state, "state"),
            "ring_k": Pool((h, r, k), activation if self.derived_fold else ring, "ring"),
            "ring_v": Pool((h, r, v), ring, "ring"),
            "ring_g": Pool((h, r, k), torch.float32, "ring"),
            "ring_beta": Pool((h, r), torch.float32, "ring"),
        }
        return pools | scale_pools(state, h, v) | copy_pools(self.read_dtype, h, v, k)
