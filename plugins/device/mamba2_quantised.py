"""Steps of ``replayssm::mamba2`` and ``replayssm::materialise`` with a quantised state (plugins/quantised_state.py)."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.device.mamba2_shape import size_macros
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, Macros, slot_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.materialise import check_prefix
from trtllm_replayssm.plugins.quantised_state import SCALE
from trtllm_replayssm.plugins.reference.mamba2 import Mamba2Recurrence
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

POOLS = ("state", "ring_x", "ring_b", "ring_dt", SCALE)
#: Rows of a head's state that a warp has, and entries that a block may take at once.
ROWS_A_WARP, PIECES = 8, (32, 16, 8)
#: Shared memory of a block that leaves room for a few on each multiprocessor.
SHARED_BYTES = 47 << 10


def quantised_record(
    a: Mamba2Attributes,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
) -> Launch:
    """strides: token strides of xbc and dt, then slot strides of POOLS, in elements."""
    defines: Macros = (
        ("ACT", CUDA_TYPES[activation]),
        ("RING", CUDA_TYPES[ring]),
        ("FP8", int(state == torch.float8_e4m3fn)),
        *size_macros(a),
        ("PIECE", piece(a, tokens)),
    )
    kernel = Kernel("mamba2_quantised.cu", "mamba2_quantised", 32 * -(-a.head_dim // ROWS_A_WARP), defines)
    return Launch(kernel, (a.num_heads, rows, 1), (tokens, *strides))


def piece(a: Mamba2Attributes, tokens: int) -> int:
    """Entries of a piece: no more than a step brings, if they fit into shared memory."""
    wanted = PIECES[1] if tokens > MAX_VERIFY_TOKENS else a.ring_rows
    fitting = [n for n in PIECES if 4 * n * (2 * a.state_size + a.head_dim + 2 + n) <= SHARED_BYTES]
    return min((n for n in fitting if n >= wanted), default=fitting[0])


def materialise(
    recurrence: Mamba2Recurrence,
    pools: dict[str, Tensor],
    source: int,
    destination: int,
    folded: int,
    prefix_len: int,
) -> None:
    """See plugins/reference/materialise.py: a step without tokens, which folds the source's ring into the destination."""
    check_prefix(source, destination, folded, prefix_len)
    from_slot, to_slot = ({name: pools[name][i : i + 1] for name in POOLS} for i in (source, destination))
    if prefix_len == folded:
        for name in ("state", SCALE):
            to_slot[name].view(torch.int8).copy_(from_slot[name].view(torch.int8))
        return
    state, ring_x, ring_b = (pools[name] for name in POOLS[:3])
    heads, head_dim, state_size = state.shape[1:]
    a = Mamba2Attributes(heads, head_dim, state_size, ring_b.shape[1], ring_x.shape[2], ring_x.shape[2])
    step = torch.zeros(1, STEP_WORDS, dtype=torch.int32, device=state.device)
    step[:, Step.FOLDED], step[:, Step.COMMITTED : Step.FOLD_TO + 1 : 2] = folded, prefix_len
    strides = (0, 0, *(slot_stride(pools[name]) for name in POOLS))
    record = quantised_record(a, ring_x.dtype, state.dtype, ring_x.dtype, 1, 0, strides)
    # Activations, their weights and outputs are those of no token.
    A_log = (-recurrence.A).log()
    launch(record, (None, None, A_log, A_log, A_log, step, *from_slot.values()), (A_log, *to_slot.values()))


def variants() -> list[Kernel]:
    """Nemotron-3 Nano with both formats and all kinds of steps, and an odd shape."""
    bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
    cases = [
        *product([(64, 64, 128, 8)], (bf16,), (int8, fp8), (1, 4, 2048)),
        *product([(64, 64, 256, 8), (32, 80, 128, 1), (24, 48, 40, 1)], (bf16, torch.float32), (int8,), (1, 4)),
    ]
    kernels = []
    for shape, activation, state, tokens in cases:
        a = Mamba2Attributes(*shape, 16, 16 + (tokens if tokens == 4 else 0))
        kernels.append(quantised_record(a, activation, state, activation, 1, tokens, (0,) * 7).kernel)
    return list(dict.fromkeys(kernels))
