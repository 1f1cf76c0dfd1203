"""The quantised state: a checkpoint of 8-bit codes with a float32 scale for each row, and no other copy of it.

A state ``[slots, H, R, C]``, whose last dimension is the contraction, takes a quarter of its float32 size. The pool ``state``
has one of the dtypes below, and one pool stands behind the layer's others:

| state dtype | state [slots, H, R, C]          | state_scale [slots, H, R] |
|-------------|---------------------------------|---------------------------|
| int8        | integers of -127 to 127         | float32, ``|row| / 127``  |
| fp8         | E4M3 (torch.float8_e4m3fn)      | float32, ``|row| / 448``  |

x is the new checkpoint in float32, ``|.|`` the largest magnitude, rn rounds to the nearest, to the even code where two are as
near; quotients and products are rounded to float32 by themselves:

    s = |row| / 127 or / 448,  code = rn(x / s), at most the largest, 0 where s is 0,  value = code * s

A scale that is no normal number is coarse, so that x / s may be larger than the largest code.

A row that is not finite has a scale that is none, and no numbers as values.

Codes and scale are written together, whenever a checkpoint is written; a step that writes one computes its outputs from the
unrounded state. Steps and folds read what is stored, so that what rounding loses stays in the state until it decays: errors
grow with the number of folds. Rows of the delta rule feed a rounded state back into their own updates, which is why their
layers take a quantised state only when they are forced to (replay.ReplayConfig).
"""

from __future__ import annotations

import torch

from trtllm_replayssm.plugins.pools import Pool

#: Largest code by dtype of the state.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: The pool of scales.
SCALE = "state_scale"


def scale_pools(state: torch.dtype, heads: int, rows: int) -> dict[str, Pool]:
    """The pool that a state of this dtype adds to a layer's others; none where the dtype is no quantised one."""
    return {SCALE: Pool((heads, rows), torch.float32, "state")} if state in LARGEST else {}
