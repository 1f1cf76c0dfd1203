"""Macros that all Mamba-2 kernels share."""

from __future__ import annotations

import math

from trtllm_replayssm.plugins.launch import Macros
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

#: Largest finite float32: "no upper clamp" in the kernels.
NO_CLAMP = "3.4028235e38f"


def size_macros(a: Mamba2Attributes) -> Macros:
    return (
        ("HEADS", a.num_heads),
        ("HEAD_DIM", a.head_dim),
        ("STATE_SIZE", a.state_size),
        ("GROUPS", a.n_groups),
        ("RING_ROWS", a.ring_rows),
        ("DT_MIN", f"{float(a.dt_min)!r}f"),
        ("DT_MAX", NO_CLAMP if math.isinf(a.dt_max) else f"{float(a.dt_max)!r}f"),
    )
