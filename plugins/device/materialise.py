"""CUDA implementation of ``replayssm::materialise``; the contract is in plugins/materialise.py.

Shapes and element types are those of the pools, so that one function serves every recurrent layer. Slots and lengths are
launch arguments: a captured launch repeats the same copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.mamba2_quantised import materialise as materialise_quantised
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, slot_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.materialise import check_prefix
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.quantised_state import SCALE
from trtllm_replayssm.plugins.read_copy import FORMATS, copy_names, read_dtype_of
from trtllm_replayssm.plugins.reference.delta_rule import DeltaRule
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.plugins.reference.replay import Recurrence

#: Warps of a block, a row of the state each; where there is a read copy, of a block that has a whole head.
WARPS, COPY_WARPS = 4, 16


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
    read_dtype = read_dtype_of(pools)
    own |= {"READ_BITS": 0 if read_dtype == "same" else FORMATS[read_dtype].bits}
    threads = 32 * (WARPS if read_dtype == "same" else COPY_WARPS)
    return Kernel(f"materialise_{name}.cu", f"materialise_{name}", threads, (*sizes.items(), *own.items()))


def materialise(
    recurrence: Recurrence, pools: dict[str, Tensor], source: int, destination: int, folded: int, prefix_len: int
) -> None:
    """See plugins/reference/materialise.py."""
    # Only Mamba-2 layers come as far as a snapshot with such a state.
    if isinstance(recurrence, Mamba2Recurrence) and SCALE in pools:
        materialise_quantised(recurrence, pools, source, destination, folded, prefix_len)
        return
    check_prefix(source, destination, folded, prefix_len)
    state = pools["state"]
    copies = tuple(pools[name] for name in copy_names(read_dtype_of(pools)))
    bound = (state, *(pools[f"ring_{entry}"] for entry in recurrence.payload), *copies)
    weights = (recurrence.A,) if isinstance(recurrence, Mamba2Recurrence) else ()
    heads, rows = state.shape[1:3]
    grid = (heads if copies else -(-heads * rows // WARPS), 1, 1)
    integers = (source, destination, folded, prefix_len, *map(slot_stride, bound))
    launch(Launch(kernel_of(recurrence, pools), grid, integers), (*weights, *bound), (state, *copies))


def variants() -> list[Kernel]:
    """Nemotron-3 Nano, Qwen3.5-35B and Kimi Linear with both state types and both read copies, and a derived fold."""
    bf16, fp32 = torch.bfloat16, torch.float32
    plain = Mamba2Recurrence(torch.zeros(1), torch.zeros(1))
    layers: tuple[Mamba2Attributes | GatedDeltaAttributes | KdaAttributes, ...] = (
        Mamba2Attributes(64, 64, 128, 8, 16, 16),
        GatedDeltaAttributes(16, 32, 128, 128, 16, 16),
        KdaAttributes(32, 128, 128, 16, 16),
    )
    nano, qwen, kimi = (layer.pools for layer in layers)
    exact, derived = DeltaRule(False), DeltaRule(True)
    recurrences = (plain, exact, exact)
    cases: list[tuple[Recurrence, dict[str, Pool]]] = [
        *((plain, nano(bf16, state, bf16)) for state in (fp32, bf16)),
        *((exact, pools(bf16, state, bf16)) for pools in (qwen, kimi) for state in (fp32, bf16)),
        (derived, qwen(bf16, fp32, bf16)),
        *(
            (recurrence, replace(layer, read_dtype=read_dtype).pools(bf16, fp32, bf16))
            for recurrence, layer in zip(recurrences, layers, strict=True)
            for read_dtype in FORMATS
        ),
    ]
    return [
        kernel_of(layer, {name: pool.allocate(1, "meta") for name, pool in pools.items()}) for layer, pools in cases
    ]
