"""CUDA implementation of ``replayssm::kda``; the contract is in plugins/kda.py."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from trtllm_replayssm.plugins.device.delta_rule import (
    DeltaShape,
    launch_record,
    pool_tensors,
    strides_of,
    variant,
)
from trtllm_replayssm.plugins.device.standard import delta_standard
from trtllm_replayssm.plugins.driver import launch
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import Kernel, on_vectors
from trtllm_replayssm.plugins.read_copy import FORMATS


def shape_of(a: KdaAttributes) -> DeltaShape:
    bound = 0.0 if a.lower_bound is None else a.lower_bound
    macros = (("BETA_SCALE", "1.0f"), ("LOWER_BOUND", f"{float(bound)!r}f"))
    dims = (a.num_heads, a.num_heads, a.key_dim, a.value_dim)
    return DeltaShape("kda", *dims, a.window, a.ring_rows, a.derived_fold, True, a.read_dtype, macros)


def kda(
    attributes: KdaAttributes,
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/reference/delta_rule.py. ``qkv``, ``f`` and ``b`` may be slices of wider tokens."""
    rows, tokens, _ = qkv.shape
    shape = shape_of(attributes)
    bound = pool_tensors(shape, pools)
    o = torch.empty(rows, tokens, shape.value_heads * shape.value_dim, dtype=qkv.dtype, device=qkv.device)
    strides = strides_of(qkv, f, b, bound)
    dtypes = (qkv.dtype, pools["state"].dtype, pools["ring_v"].dtype)
    record = launch_record(shape, *dtypes, rows, tokens, strides, on_vectors((qkv, f, dt_bias), bound))
    launch(record, (qkv, f, b, A_log, dt_bias, step, *bound), (o, *bound))
    return o


def variants() -> list[Kernel]:
    """The heads of Kimi Linear, whole heads and slices, both gates, every token range, read copies; and the other shapes."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def compiled(dims, state, tokens, split=1, bound=None, activation=bf16, window=16, read_dtype="same"):
        rows = window + (tokens if 1 < tokens <= 16 else 0)
        key_dim, value_dim = dims
        shape = shape_of(KdaAttributes(32, key_dim, value_dim, window, rows, bound, read_dtype=read_dtype))
        return variant(shape, activation, state, activation, tokens, split, True)

    def prefill(state, rows, bound=None, value_dim=128, read_dtype="same"):
        shape = shape_of(KdaAttributes(32, 128, value_dim, 16, 16, bound, read_dtype=read_dtype))
        return launch_record(shape, bf16, state, bf16, rows, 2048, ()).kernel

    plain = shape_of(KdaAttributes(32, 128, 128, 1, 1))
    return [
        *(compiled((128, 128), s, t) for s in (fp32, bf16, fp16) for t in (1, 2, 4, 8, 16, 64)),
        *(compiled((128, 128), fp32, t, split, -5.0) for split in (2, 4, 8) for t in (1, 4, 64)),
        *(delta_standard(plain, bf16, s, 1, ()).kernel for s in (fp32, bf16, fp16)),
        *(compiled((k, v), fp32, t) for k, v in ((64, 64), (96, 192), (192, 96), (256, 256)) for t in (1, 8, 64)),
        *(compiled((128, 128), fp32, t, activation=fp32) for t in (1, 8, 64)),
        *(
            compiled((128, 128), s, t, read_dtype=read_dtype)
            for read_dtype, s, t in product(FORMATS, (fp32, bf16), (1, 4, 16, 64))
        ),
        *(compiled((128, 128), fp32, t, 4, read_dtype="fp8") for t in (1, 64)),
        *(prefill(s, rows) for s in (fp32, bf16, fp16) for rows in (1, 8)),
        *(prefill(fp32, rows, -5.0, value_dim) for value_dim in (64, 128) for rows in (1, 8)),
        *(prefill(fp32, rows, read_dtype=read) for read in FORMATS for rows in (1, 8)),
    ]
