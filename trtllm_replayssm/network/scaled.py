"""Products of FP8 weights with activations that are quantised token by token, for devices that multiply FP8 numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_replayssm.compat import FIRST_CAPABILITIES
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.packed import PackedWeight, Packing

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
#: Both sizes of a weight are multiples of it.
ALIGNMENT = 16


def check_products(device: torch.device) -> None:
    """Raises EngineError for a GPU that does not multiply FP8 numbers; CPUs compute the same, slowly."""
    first = FIRST_CAPABILITIES[E4M3]
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < first:
        raise EngineError(
            "compute capability {}.{} has no FP8 products, which begin with {}.{}".format(*found, *first),
            "leave out --scaled_matmul",
        )


def suited(packing: Packing, shape: Sequence[int], activation: torch.dtype) -> bool:
    """Whether the product takes a weight of this rank: a matrix with a scale a row, for activations in bfloat16."""
    matrix = packing.quant_algo == "FP8" and packing.group_size is None and len(shape) == 2
    return matrix and activation == torch.bfloat16 and not any(size % ALIGNMENT for size in shape)


def scaled_linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """``x @ weight^T`` in bfloat16, x ``[..., K]`` rounded to E4M3 with a scale for every token: its largest over 448.

    Sums are in float32. The rounding errs by up to 1/16 of a value; what it adds to a product is about 2 to 3 percent.
    """
    values, scales = weight.parts
    tokens = x.flatten(0, -2).float()
    by_token = tokens.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / E4M3_MAX
    rounded = (tokens / by_token).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    if x.device.type == "cuda":
        out = torch._scaled_mm(rounded, values.t(), by_token, scales.view(1, -1), out_dtype=torch.bfloat16)
    else:
        # On CPUs, torch's own takes scales of tokens and rows from some version on only.
        out = ((rounded.float() @ values.float().t()) * by_token * scales.view(1, -1)).to(torch.bfloat16)
    return out.view(*x.shape[:-1], -1)
