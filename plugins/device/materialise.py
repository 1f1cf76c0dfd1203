"""CUDA implementation of ``replayssm::materialise``; the contract is in plugins/materialise.py.

Shapes and element types are those of the pools, so that one function serves every recurrent layer. Slots and lengths are
launch arguments: a captured launch repeats the same copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.materialise import check_prefix
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.reference.delta_rule import DeltaRule
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.replay import Recurrence

WARPS = 4


def kernel_of(recurrence: Recurrence, pools: dict[str, Tensor]) -> Kernel:
    """The variant for these pools. Raises TypeError for a recurrence that has no kernel."""
    own: dict[str, str | int] = {"STATE": CUDA_TYPES[pools["state"].dtype]}
    if isinstance(recurrence, Mamba2Recurrence):
        name, shared = "mamba2", pools["ring_b"]
        own |= {"RING": CUDA_TYPES[shared.dtype]}
    elif isinstance(recurrence, DeltaRule):
        name, shared = "delta_rule", pools["ring_k"]
        own |= {"RING_K": CUDA_TYPES[shared.dtype], "RING_V": CUDA_TYPES[pools["ring_v"].dtype]}
        own |= {"PER_CHANNEL": int(pools["ring_g"].ndim == 4), "DERIVED": int(recurrence.derived)}
    else:
        raise TypeError(f"no kernel materialises {type(recurrence).__name__}")
    _, heads, rows, columns = pools["state"].shape
    sizes = {"HEADS": heads, "ROWS": rows, "COLUMNS": columns, "GROUPS": shared.shape[1], "RING_ROWS": shared.shape[2]}
    return Kernel(f"materialise_{name}.cu", f"materialise_{name}", 32 * WARPS, (*sizes.items(), *own.items()))


def materialise(
    recurrence: Recurrence, pools: dict[str, Tensor], source: int, destination: int, folded: int, prefix_len: int
) -> None:
    """See plugins/reference/materialise.py."""
    check_prefix(source, destination, folded, prefix_len)
    state = pools["state"]
    bound = (state, *(pools[f"ring_{entry}"] for entry in recurrence.payload))
    weights = (recurrence.A,) if isinstance(recurrence, Mamba2Recurrence) else ()
    grid = (-(-state.shape[1] * state.shape[2] // WARPS), 1, 1)
    integers = (source, destination, folded, prefix_len, *map(slot_stride, bound))
    launch(Launch(kernel_of(recurrence, pools), grid, integers), (*weights, *bound), (state,))


def variants() -> list[Kernel]:
    """Nemotron-3 Nano, Qwen3.5-35B and Kimi Linear with both state types, and a derived fold."""
    bf16, fp32 = torch.bfloat16, torch.float32
    plain = Mamba2Recurrence(torch.zeros(1), torch.zeros(1))
    nano = Mamba2Attributes(64, 64, 128, 8, 16, 16).pools
    qwen = GatedDeltaAttributes(16, 32, 128, 128, 16, 16).pools
    kimi = KdaAttributes(32, 128, 128, 16, 16).pools
    exact, derived = DeltaRule(False), DeltaRule(True)
    cases: list[tuple[Recurrence, dict[str, Pool]]] = [
        *((plain, nano(bf16, state, bf16)) for state in (fp32, bf16)),
        *((exact, pools(bf16, state, bf16)) for pools in (qwen, kimi) for state in (fp32, bf16)),
        (derived, qwen(bf16, fp32, bf16)),
    ]
    return [
        kernel_of(layer, {name: pool.allocate(1, "meta") for name, pool in pools.items()}) for layer, pools in cases
    ]
