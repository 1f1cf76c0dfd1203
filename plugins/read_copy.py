"""The read copy: a narrow copy of a checkpoint from which outputs are computed, beside the checkpoint that is folded.

With state ``[slots, H, R, C]``, whose last dimension is the contraction, an attribute ``read_dtype`` other than ``same``
adds these pools to a recurrent layer, behind its others and in this order. They hold raw bits as int8.

| read_dtype | tensor          | shape                | bits                                                          |
|------------|-----------------|----------------------|---------------------------------------------------------------|
| fp8        | read_codes      | [slots, H, R, C]     | E4M3                                                          |
|            | read_scales     | [slots, H, R, C/32]  | E8M0, ``2^(byte - 127)``; one for 32 columns, as in MXFP8     |
| nvfp4      | read_codes      | [slots, H, R, C/2]   | E2M1; column 2i in the low four bits, 2i + 1 in the high ones |
|            | read_scales     | [slots, H, R, C/16]  | E4M3; one for 16 columns                                      |
|            | read_head_scale | [slots, H]           | float32                                                       |

x is the checkpoint as it is stored, in float32; rn rounds to the nearest, to the even code where two are as near, and keeps
the sign of x, also of zero. Every product and quotient is rounded to float32 by itself. ``|.|`` is the largest magnitude.

    fp8     e = least integer with |block| <= 448 * 2^e, at least -126 (also where |block| is 0)
            code = rn_E4M3(x * 2^-e),  value = code * 2^e
    nvfp4   h = |head| / 2688                                                 (2688 = 6 * 448)
            b = rn_E4M3(min((|block| / 6) / h, 448)), 0 where h is 0
            s = b * h
            code = rn_E2M1(x * (1 / s)), at most 6 in magnitude; 0 where s is 0
            value = (code * b) * h

``code * b`` has six bits at most and is exact in bfloat16 and float16; fp8 values are exact in bfloat16. What is not finite
is no number in the copy, and neither is the rest of an nvfp4 head.

Whatever writes a checkpoint writes its copy, in the same step: a flush, an absorbing step, ``replayssm::materialise`` at its
destination. Steps of at most MAX_VERIFY_TOKENS tokens a row (decode and verify) compute their outputs from the copy as it
was before the step, which is not read where nothing was folded yet, the live ring and their own tokens, also where they
fold, so that an output does not depend on whether its step folds. Their fold reads checkpoint and raw ring alone: the
checkpoint is bit for bit the one of a layer without a copy. Longer steps (prefill) compute their outputs from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReadDtype

#: Largest magnitudes of E4M3 and E2M1, and the least exponent of an fp8 block.
E4M3_MAX, E2M1_MAX, LEAST_EXPONENT = 448.0, 6.0, -126
#: Magnitudes of E2M1 by the lower three bits of a code; the fourth is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class CopyFormat:
    """block: columns that share a scale. bits: of a code. head_scale: whether each head has a float32 scale."""

    block: int
    bits: int
    head_scale: bool

    def pools(self, heads: int, rows: int, columns: int) -> dict[str, Pool]:
        """Pools of the copy of a state ``[heads, rows, columns]``."""
        pools = {
            "read_codes": Pool((heads, rows, columns * self.bits // 8), torch.int8, "copy"),
            "read_scales": Pool((heads, rows, columns // self.block), torch.int8, "copy"),
        }
        return pools | ({"read_head_scale": Pool((heads,), torch.float32, "copy")} if self.head_scale else {})


FORMATS: dict[ReadDtype, CopyFormat] = {"fp8": CopyFormat(32, 8, False), "nvfp4": CopyFormat(16, 4, True)}


def copy_names(read_dtype: ReadDtype) -> tuple[str, ...]:
    """Names of the copy's pools, in order."""
    return () if read_dtype == "same" else tuple(FORMATS[read_dtype].pools(1, 1, FORMATS[read_dtype].block))


def copy_pools(read_dtype: ReadDtype, heads: int, rows: int, columns: int) -> dict[str, Pool]:
    """Pools that ``read_dtype`` adds to those of a state ``[heads, rows, columns]``; none for ``same``.

    Raises UserError when the columns do not divide into the format's blocks.
    """
    if read_dtype == "same":
        return {}
    layout = FORMATS[read_dtype]
    if columns % layout.block:
        narrower = next((name for name, other in FORMATS.items() if columns % other.block == 0), None)
        raise UserError(
            f"state_read_dtype {read_dtype} needs states whose width is a multiple of {layout.block}; it is {columns}",
            f"use --state_read_dtype {narrower}, or same"
            if narrower
            else "leave --state_read_dtype at same for this model",
        )
    return layout.pools(heads, rows, columns)


def read_dtype_of(pools: Container[str]) -> ReadDtype:
    """The ``read_dtype`` of a layer that has these pools."""
    if "read_codes" not in pools:
        return "same"
    return "nvfp4" if "read_head_scale" in pools else "fp8"
