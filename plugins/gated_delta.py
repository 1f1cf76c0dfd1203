"""``replayssm::gated_delta``: the gated delta rule (Gated DeltaNet) with ReplaySSM state.

| tensor    | shape                                     | dtype      | direction                                          |
|-----------|-------------------------------------------|------------|----------------------------------------------------|
| qkv       | [rows, T, 2*Hk*K + Hv*V]                  | activation | in; q, k, v after convolution and SiLU             |
| a         | [rows, T, Hv]                             | activation | in; decay logits                                   |
| b         | [rows, T, Hv]                             | activation | in; beta logits                                    |
| A_log     | [Hv]                                      | float32    | in                                                 |
| dt_bias   | [Hv]                                      | float32    | in                                                 |
| step      | [rows, STEP_WORDS]                        | int32      | in; cursors.Step                                   |
| state     | [slots, Hv, V, K]                         | state      | in and out, one address; the checkpoint            |
| ring_k    | [slots, Hk, ring_rows, K]                 | activation | in and out, one address; k before normalisation    |
| ring_v    | [slots, Hv, ring_rows, V]                 | ring       | in and out; v (fold exact) or u (fold derived)     |
| ring_g    | [slots, Hv, ring_rows]                    | float32    | in and out, one address; log decay g               |
| ring_beta | [slots, Hv, ring_rows]                    | float32    | in and out, one address; beta                      |
| read_*    | [slots, Hv, ...], of an [Hv, V, K] state  | raw bits   | in and out; none where read_dtype is same          |
| o         | [rows, T, Hv*V]                           | activation | out; zero for padding rows and tokens              |

Per value head, which reads key head ``i // (Hv/Hk)``, in float32 (Gated DeltaNet, arXiv 2412.06464, equation 10):

    q = K^-1/2 q / sqrt(sum q^2 + 1e-6),  k = k / sqrt(sum k^2 + 1e-6)
    g = -exp(A_log) softplus(a + dt_bias),  beta = beta_scale sigmoid(b)
    S = exp(g) S;  u = beta (v - S k);  S = S + u k^T;  o = S q

``read_dtype`` adds a narrow copy of the state for outputs (plugins/read_copy.py); only an exact fold may have one.
A state of 8 bits has a pool ``state_scale`` [slots, Hv, V] behind these (plugins/quantised_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.quantised_state import scale_pools
from trtllm_replayssm.plugins.read_copy import copy_pools
from trtllm_replayssm.replay import ReadDtype

#: Added under the root when q and k are normalised, as in flash-linear-attention and transformers.
L2_EPSILON = 1e-6


@dataclass(frozen=True)
class GatedDeltaAttributes:
    """num_key_heads Hk, num_value_heads Hv, key_dim K, value_dim V; beta_scale is 2 where eigenvalues may be negative."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    window: int
    ring_rows: int
    beta_scale: float = 1.0
    derived_fold: bool = False
    read_dtype: ReadDtype = "same"

    def pools(self, activation: torch.dtype, state: torch.dtype, ring: torch.dtype) -> dict[str, Pool]:
        hk, hv, k, v, r = self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, self.ring_rows
        pools = {
            "state": Pool((hv, v, k), state, "state"),
            "ring_k": Pool((hk, r, k), activation if self.derived_fold else ring, "ring"),
            "ring_v": Pool((hv, r, v), ring, "ring"),
            "ring_g": Pool((hv, r), torch.float32, "ring"),
            "ring_beta": Pool((hv, r), torch.float32, "ring"),
        }
        return pools | scale_pools(state, hv, v) | copy_pools(self.read_dtype, hv, v, k)
