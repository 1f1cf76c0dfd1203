"""CUDA implementation of ``replayssm::gated_delta``; the contract is in plugins/gated_delta.py."""

from __future__ import annotations

from dataclasses import replace

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
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.launch import Kernel, on_vectors
from trtllm_replayssm.plugins.read_copy import FORMATS


def shape_of(a: GatedDeltaAttributes) -> DeltaShape:
    heads, dims = (a.num_key_heads, a.num_value_heads), (a.key_dim, a.value_dim)
    macros = (("BETA_SCALE", f"{float(a.beta_scale)!r}f"),)
    return DeltaShape("gated_delta", *heads, *dims, a.window, a.ring_rows, a.derived_fold, False, a.read_dtype, macros)


def gated_delta(
    attributes: GatedDeltaAttributes,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    step: Tensor,
    pools: dict[str, Tensor],
) -> Tensor:
    """See plugins/reference/delta_rule.py. ``qkv``, ``a`` and ``b`` may be slices of wider tokens."""
    rows, tokens, _ = qkv.shape
    shape = shape_of(attributes)
    bound = pool_tensors(shape, pools)
    o = torch.empty(rows, tokens, shape.value_heads * shape.value_dim, dtype=qkv.dtype, device=qkv.device)
    strides = strides_of(qkv, a, b, bound)
    dtypes = (qkv.dtype, pools["state"].dtype, pools["ring_v"].dtype)
    record = launch_record(shape, *dtypes, rows, tokens, strides, on_vectors((qkv,), bound))
    launch(record, (qkv, a, b, A_log, dt_bias, step, *bound), (o, *bound))
    return o


def variants() -> list[Kernel]:
    """Key and value heads of Qwen3.5-35B and 122B, two heads, one and slices of one, every token range, read copies; other
    shapes."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def compiled(heads, dims, state, tokens, split=1, activation=bf16, block_heads=1, window=16, read_dtype="same"):
        rows = window + (tokens if 1 < tokens <= 16 else 0)
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        attributes = GatedDeltaAttributes(key_heads, value_heads, key_dim, value_dim, window, rows)
        shape = shape_of(replace(attributes, read_dtype=read_dtype))
        return variant(shape, activation, state, activation, tokens, split, True, block_heads)

    def prefill(dims, state, rows, activation=bf16, read_dtype="same"):
        key_dim, value_dim = dims
        shape = shape_of(GatedDeltaAttributes(16, 32, key_dim, value_dim, 16, 16, read_dtype=read_dtype))
        return launch_record(shape, activation, state, activation, rows, 2048, ()).kernel

    plain = shape_of(GatedDeltaAttributes(16, 32, 128, 128, 1, 1))
    return [
        *(compiled((16, 32), (128, 128), s, t) for s in (fp32, bf16, fp16) for t in (1, 2, 4, 8, 16, 64)),
        *(compiled((16, 32), (128, 128), fp32, t, split) for split in (2, 4, 8) for t in (1, 4, 64)),
        *(
            compiled((16, h), (128, 128), s, t, block_heads=2)
            for h in (32, 64)
            for s in (fp32, bf16, fp16)
            for t in (1, 4)
        ),
        *(delta_standard(plain, bf16, s, 1, ()).kernel for s in (fp32, bf16, fp16)),
        compiled((16, 32), (128, 128), fp32, 1, window=32),
        *(
            compiled((16, 32), (k, v), fp32, t)
            for k, v in ((64, 64), (96, 192), (192, 96), (256, 256))
            for t in (1, 8, 64)
        ),
        *(compiled((16, 32), (128, 128), fp32, t, activation=fp32) for t in (1, 8, 64)),
        *(
            compiled((16, h), (128, 128), s, t, split, block_heads=n, read_dtype=read_dtype)
            for read_dtype in FORMATS
            for h, s, t, split, n in (
                *((h, s, t, 1, 2) for h in (32, 64) for s in (fp32, bf16) for t in (1, 4)),
                *((32, fp32, t, 1, 1) for t in (1, 2, 8, 16, 64)),
                *((32, fp32, t, 4, 1) for t in (1, 4, 64) if read_dtype == "fp8"),
            )
        ),
        *(compiled((16, 32), (k, 192), fp32, t, read_dtype="nvfp4") for k, t in ((96, 1), (192, 8), (256, 64))),
        *(compiled((16, 32), (128, 128), fp32, t, activation=fp32, read_dtype="fp8") for t in (1, 8, 64)),
        compiled((16, 32), (128, 128), fp32, 1, window=32, read_dtype="nvfp4"),
        *(prefill((128, 128), s, rows) for s in (fp32, bf16, fp16) for rows in (1, 8)),
        *(prefill(dims, fp32, rows) for dims in ((64, 64), (64, 128), (128, 64)) for rows in (1, 8)),
        *(prefill((128, 128), fp32, rows, fp16) for rows in (1, 8)),
        *(prefill((128, 128), fp32, rows, read_dtype=read) for read in FORMATS for rows in (1, 8)),
    ]
