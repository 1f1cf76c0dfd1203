"""CUDA implementation of ``replayssm::mamba2``; the contract is in plugins/mamba2.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.mamba2_copy import copy_step_record, read_bits
from trtllm_replayssm.plugins.device.mamba2_prefill import prefill_record
from trtllm_replayssm.plugins.device.mamba2_quantised import quantised_record
from trtllm_replayssm.plugins.device.mamba2_shape import BLOCK_SHARED_BYTES, shared_bytes, size_macros, step_launch
from trtllm_replayssm.plugins.device.standard import is_standard, mamba2_standard, warp_rows
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.launch import CUDA_TYPES, Kernel, Launch, Macros, on_vectors, slot_stride, token_stride
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.quantised_state import LARGEST, SCALE
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReadDtype

#: Longest sequence of a row that mamba2_step keeps in registers, by the largest state size.
MOST_ENTRIES = {128: 64, 256: 48}
#: Warps a device should be given before a block takes more heads, for steps of one token and of several.
WARPS_WANTED, VERIFY_WARPS_WANTED = 2048, 4096
#: Steps of one token in which each warp works alone (mamba2_single.cu): the most entries and the largest state they take, and
#: warps of a block.
SINGLE_ENTRIES, SINGLE_STATE_SIZE, SINGLE_BLOCK = 16, 128, 2
#: Warps of these that a multiprocessor holds without spilling, by the size of a state's element; four fewer of float16 inputs.
SINGLE_WARPS = {2: 16, 4: 12}


def launch_record(
    a: Mamba2Attributes,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
    aligned: bool = True,
) -> Launch:
    """strides: token strides of xbc and dt, then slot strides of state, ring_x, ring_b, ring_dt and of the read copy's pools or
    the scale of a quantised state, in elements.

    aligned: xbc and every slot of the pools start on 16 bytes, as tensors of TensorRT and fresh torch tensors do.
    """
    if state in LARGEST:
        return quantised_record(a, activation, state, ring, rows, tokens, strides)
    shape = (
        ("ACT", CUDA_TYPES[activation]),
        ("STATE", CUDA_TYPES[state]),
        *size_macros(a),
        ("STOCHASTIC", int(a.stochastic_rounding and state.itemsize == 2)),
        ("READ_BITS", read_bits(a)),
    )
    vectors = aligned and strides[0] * activation.itemsize % 16 == 0
    if not vectors or not fits_matrix_kernels(a, activation, ring) or not fits_block(a, tokens):
        return recurrent_record(a, shape, ring, rows, tokens, strides)
    dims = a.head_dim, a.state_size
    if is_standard(a.window, a.ring_rows, tokens) and warp_rows(dims, state) and not read_bits(a):
        return mamba2_standard(shape, a.num_heads, dims, state, rows, (tokens, *strides, 0))
    if tokens > MAX_VERIFY_TOKENS:
        return prefill_record(a, shape, activation, rows, tokens, strides)
    if read_bits(a):
        return copy_step_record(a, shape, state, rows, tokens, most_entries(a, tokens), (tokens, *strides))
    return step_record(a, shape, activation, state, rows, tokens, strides)


def recurrent_record(
    a: Mamba2Attributes, shape: Macros, ring: torch.dtype, rows: int, tokens: int, strides: tuple[int, ...]
) -> Launch:
    """The plain recurrence: a warp for each row of the state, or a block for each head where there is a read copy."""
    copied = read_bits(a) > 0
    own = (("RING", CUDA_TYPES[ring]), ("FROM_COPY", int(copied and tokens <= MAX_VERIFY_TOKENS)))
    kernel = Kernel("mamba2_recurrent.cu", "mamba2_recurrent", 128, (*shape, *own))
    blocks = a.num_heads if copied else -(-a.num_heads * a.head_dim // 4)
    return Launch(kernel, (blocks, rows, 1), (tokens, *strides, 0))


def most_entries(a: Mamba2Attributes, tokens: int) -> int:
    """Longest history and step of a row. With drafts the ring holds the whole window before a step; without, the step that
    would fill it folds."""
    return (a.window if a.ring_rows > a.window else a.window - 1) + tokens


def fits_matrix_kernels(a: Mamba2Attributes, activation: torch.dtype, ring: torch.dtype) -> bool:
    """Whether the matrix-product kernels take such a layer; the plain recurrence takes the others."""
    narrow = activation.itemsize == 2 and ring == activation
    return narrow and a.head_dim % 16 == 0 and a.head_dim <= 128 and a.state_size in (32, 64, 128, 256)


def fits_block(a: Mamba2Attributes, tokens: int) -> bool:
    """False for the longest windows with the longest verify steps, which leave a block too few registers or too little shared
    memory."""
    if tokens > MAX_VERIFY_TOKENS:
        return True
    entries = most_entries(a, tokens)
    limit = next(entries for size, entries in MOST_ENTRIES.items() if a.state_size <= size)
    return entries <= limit and sum(shared_bytes(a, tokens, entries)) <= BLOCK_SHARED_BYTES


def step_record(
    a: Mamba2Attributes,
    shape: Macros,
    activation: torch.dtype,
    state: torch.dtype,
    rows: int,
    tokens: int,
    strides: tuple[int, ...],
) -> Launch:
    """The heads of a block share the ring's B, so that it takes as many as leave the device enough warps."""
    entries, own = most_entries(a, tokens), a.head_dim // 16
    warps = step_warps(a, activation, state, entries)
    if tokens == 1 and works_alone(a, rows):
        alone = min(warps, SINGLE_WARPS[state.itemsize] - 4 * (activation == torch.float16))
        return single_record(a, shape, state, rows, alone, strides)
    blocks = -(-(WARPS_WANTED if tokens == 1 else VERIFY_WARPS_WANTED) // own)
    in_flight = min(4096, 16 * a.state_size * state.itemsize) * own
    integers = (tokens, *strides)
    return step_launch("mamba2_step", a, shape, rows, tokens, entries, warps, blocks, in_flight, integers)


def works_alone(a: Mamba2Attributes, rows: int) -> bool:
    """Whether the device wants the warps of a step of one token even if each works for itself on 16 rows of a state."""
    fits = most_entries(a, 1) <= SINGLE_ENTRIES and a.state_size <= SINGLE_STATE_SIZE
    return fits and rows * (a.num_heads * a.head_dim // 16) <= WARPS_WANTED


def single_record(
    a: Mamba2Attributes, shape: Macros, state: torch.dtype, rows: int, warps: int, strides: tuple[int, ...]
) -> Launch:
    entries = most_entries(a, 1)
    tuned = (
        ("TOKENS", 1),
        ("ENTRIES", entries),
        ("HEADS_A_BLOCK", 1),
        ("WARPS_A_BLOCK", SINGLE_BLOCK),
        ("WARPS_AN_SM", warps),
    )
    in_flight = SINGLE_BLOCK * 16 * a.state_size * state.itemsize
    kernel = Kernel("mamba2_single.cu", "mamba2_single", 32 * SINGLE_BLOCK, (*shape, *tuned), in_flight)
    return Launch(kernel, (-(-a.num_heads * a.head_dim // (16 * SINGLE_BLOCK)), rows, 1), (1, *strides, 0))


def step_warps(a: Mamba2Attributes, activation: torch.dtype, state: torch.dtype, entries: int) -> int:
    """Warps a multiprocessor should hold, by which registers are divided: as many as fit without spilling."""
    if a.stochastic_rounding and state == torch.float16:
        return 8
    taken_apart = activation == torch.float16 and state == torch.float32
    return 12 if taken_apart or a.state_size > 128 or entries > 32 or a.stochastic_rounding else 16


def mamba2(
    attributes: Mamba2Attributes,
    xbc: Tensor,
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/reference/mamba2.py. ``xbc`` and ``dt`` may be slices of wider tokens."""
    a = attributes
    rows, tokens, _ = xbc.shape
    y = torch.empty(rows, tokens, a.num_heads * a.head_dim, dtype=xbc.dtype, device=xbc.device)
    behind = [SCALE] if SCALE in pools else copy_names(a.read_dtype)
    bound = tuple(pools[name] for name in ("state", "ring_x", "ring_b", "ring_dt", *behind))
    strides = (token_stride(xbc), token_stride(dt), *map(slot_stride, bound))
    dtypes = (xbc.dtype, pools["state"].dtype, pools["ring_x"].dtype)
    record = launch_record(a, *dtypes, rows, tokens, strides, on_vectors((xbc,), bound))
    launch(record, (xbc, dt, A_log, dt_bias, D, step, *bound), (y, *bound))
    return y


def variants() -> list[Kernel]:
    """Nemotron-3 Nano and Super on one GPU, other head and state sizes, and the plain kernel that takes the rest."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    nano, super_, narrow, odd = (64, 64, 128, 8), (128, 64, 128, 8), (32, 80, 128, 1), (24, 48, 40, 1)
    small, wide, long = (64, 32, 64, 4), (32, 128, 128, 2), (64, 64, 256, 8)
    cases = [
        *product((nano, super_), ((bf16, fp32), (bf16, bf16), (fp16, fp16), (fp16, fp32)), (1, 4, 8, 16)),
        *product((narrow, small, wide, long), ((bf16, fp32), (bf16, bf16)), (1, 8, 2048)),
        *product((nano, super_), ((bf16, fp32), (bf16, bf16), (fp16, fp16), (fp16, fp32)), (2048,)),
        *product((nano, odd), ((fp32, fp32), (bf16, fp32)), (1, 64)),
    ]
    kernels = []
    for (heads, head_dim, state_size, groups), (activation, state), tokens in cases:
        draft = tokens if 1 < tokens <= MAX_VERIFY_TOKENS else 0
        a = Mamba2Attributes(heads, head_dim, state_size, groups, 16, 16 + draft)
        for rows in (1, 64) if tokens == 1 else (1, 8) if tokens > MAX_VERIFY_TOKENS else (1,):
            kernels.append(launch_record(a, activation, state, activation, rows, tokens, (0,) * 6).kernel)
    # Stochastic rounding.
    for activation, state, tokens in product((bf16, fp32), (bf16, fp16), (1, 4, 2048)):
        draft = tokens if tokens == 4 else 0
        a = Mamba2Attributes(*nano, 16, 16 + draft, stochastic_rounding=True)
        for rows in (1, 64) if tokens == 1 else (1, 8) if tokens > MAX_VERIFY_TOKENS else (1,):
            kernels.append(launch_record(a, activation, state, activation, rows, tokens, (0,) * 6).kernel)
    # Read copies: tuned steps of several shapes, and the plain kernel.
    copied = [
        *product((nano,), ((bf16, fp32), (bf16, bf16)), (1, 4, 8, 16)),
        *product((small,), ((bf16, fp32),), (1, 4)),
        *product((nano,), ((bf16, fp32),), (2048,)),
        *product((nano,), ((fp32, fp32),), (1, 64)),
    ]
    formats: tuple[ReadDtype, ...] = ("fp8", "nvfp4")
    for (shape, (activation, state), tokens), read_dtype in product(copied, formats):
        draft = tokens if 1 < tokens <= MAX_VERIFY_TOKENS else 0
        a = replace(Mamba2Attributes(*shape, 16, 16 + draft), read_dtype=read_dtype)
        strides = (0,) * (6 + len(copy_names(a.read_dtype)))
        kernels.append(launch_record(a, activation, state, activation, 1, tokens, strides).kernel)
    # Windows of 1: the ordinary recurrence.
    for state, stochastic in ((fp32, False), (bf16, False), (fp16, False), (bf16, True)):
        a = Mamba2Attributes(*nano, 1, 1, stochastic_rounding=stochastic)
        kernels.append(launch_record(a, bf16, state, bf16, 1, 1, (0,) * 6).kernel)
    # Windows of 64, where a row's sequence is longest.
    for tokens in (1, 16):
        a = Mamba2Attributes(*nano, 64, 64 + (tokens if tokens > 1 else 0))
        kernels.append(launch_record(a, bf16, fp32, bf16, 1, tokens, (0,) * 6).kernel)
    return list(dict.fromkeys(kernels))
