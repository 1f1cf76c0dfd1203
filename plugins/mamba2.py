"""``replayssm::mamba2``: the Mamba-2 (SSD) recurrence with ReplaySSM state.

| tensor   | shape                                    | dtype      | direction                                           |
|----------|------------------------------------------|------------|-----------------------------------------------------|
| xbc      | [rows, T, H*P + 2*G*N]                   | activation | in; x, B, C after convolution and SiLU              |
| dt       | [rows, T, H]                             | activation | in; before bias and softplus                        |
| A_log    | [H]                                      | float32    | in                                                  |
| dt_bias  | [H]                                      | float32    | in                                                  |
| D        | [H]                                      | float32    | in                                                  |
| step     | [rows, STEP_WORDS]                       | int32      | in; cursors.Step                                    |
| state    | [slots, H, P, N]                         | state      | in and out, one address; the checkpoint             |
| ring_x   | [slots, H, ring_rows, P]                 | ring       | in and out, one address                             |
| ring_b   | [slots, G, ring_rows, N]                 | ring       | in and out, one address                             |
| ring_dt  | [slots, H, ring_rows]                    | float32    | in and out, one address; processed dt               |
| read_*   | [slots, H, ...], of an [H, P, N] state   | raw bits   | in and out, one address; none where read_dtype same |
| y        | [rows, T, H*P]                           | activation | out; zero for padding rows and tokens               |

Per head h of group ``h // (H/G)``, in float32 (Mamba-2, arXiv 2405.21060, section 7):

    dt = clamp(softplus(dt + dt_bias), dt_min, dt_max)
    S  = exp(-exp(A_log) dt) S + dt x B^T
    y  = S C + D x

With ``stochastic_rounding`` a 16-bit state is rounded at random when it is written (plugins/rounding.py), so that it is
right on average; otherwise to the nearest. ``read_dtype`` adds a narrow copy of the state for outputs, rounded to the nearest
in any case (plugins/read_copy.py). A state of 8 bits has a pool ``state_scale`` [slots, H, P] behind these
(plugins/quantised_state.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.quantised_state import scale_pools
from trtllm_replayssm.plugins.read_copy import copy_pools
from trtllm_replayssm.replay import ReadDtype


@dataclass(frozen=True)
class Mamba2Attributes:
    """num_heads H, head_dim P, state_size N, n_groups G; dt_min and dt_max clamp the time step (0 and inf: no clamp)."""

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    window: int
    ring_rows: int
    dt_min: float = 0.0
    dt_max: float = math.inf
    stochastic_rounding: bool = False
    read_dtype: ReadDtype = "same"

    def pools(self, activation: torch.dtype, state: torch.dtype, ring: torch.dtype) -> dict[str, Pool]:
        """The layer's pools; activation is unused, because everything in this ring has the ring dtype or float32."""
        h, p, n, g, r = self.num_heads, self.head_dim, self.state_size, self.n_groups, self.ring_rows
        pools = {
            "state": Pool((h, p, n), state, "state"),
            "ring_x": Pool((h, r, p), ring, "ring"),
            "ring_b": Pool((g, r, n), ring, "ring"),
            "ring_dt": Pool((h, r), torch.float32, "ring"),
        }
        return pools | scale_pools(state, h, p) | copy_pools(self.read_dtype, h, p, n)
