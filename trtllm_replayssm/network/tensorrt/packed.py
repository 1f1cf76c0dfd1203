"""Weights that stay quantised, as constants with dequantising layers behind them, and inputs that are rounded like them."""

from __future__ import annotations

import torch

from trtllm_replayssm.compat import FIRST_CAPABILITIES
from trtllm_replayssm.network.packed import NVFP4_GROUP, PackedWeight, Packing
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor

#: dtype of the values that each algorithm stores.
STORED = {"FP8": torch.float8_e4m3fn, "NVFP4": torch.float4_e2m1fn_x2}


def stays_packed(packing: Packing, width: int, capability: tuple[int, int] | None) -> bool:
    """Whether an engine for this GPU, None for any, can hold a weight of so many columns as it is.

    TensorRT dequantises groups along one axis that are all of one size.
    """
    known = capability is None or capability >= FIRST_CAPABILITIES[STORED[packing.quant_algo]]
    return known and width % (packing.group_size or width) == 0


def dequantised(e: Emitter, weight: PackedWeight, capability: tuple[int, int] | None, leading: int = 0) -> Tensor:
    """The weight in its dtype, with so many axes of size 1 before its own; a constant of its values if it has to be.

    capability: of the GPU that the engine is for, None if unknown.
    """
    ones, shape, group = (1,) * leading, weight.shape, weight.packing.group_size
    if not stays_packed(weight.packing, shape[-1], capability):
        return e.constant(weight.dense(), ones + shape)
    values, scales, *rows = weight.parts
    if weight.packing.quant_algo == "FP8":
        stored = e.constant(values, ones + shape)
        if group is None and len(shape) == 2:
            return e.dequantise(stored, e.constant(scales, shape[:1]), weight.dtype, axis=leading)
        return e.dequantise(stored, e.constant(scales, ones + tuple(scales.shape)), weight.dtype)
    stored = e.constant(values.view(STORED["NVFP4"]), ones + shape)
    by_group, (by_row,) = e.constant(scales, ones + tuple(scales.shape)), rows
    if weight.packing.divides:
        # TensorRT multiplies scales. The reciprocals are rounded: factors differ from quotients in their last bit at most.
        by_row = by_row.reciprocal()
    first = float(by_row.flatten()[0])
    if bool((by_row == first).all()):
        # One scale for the whole tensor: the form that TensorRT knows as NVFP4.
        factors = e.dequantise(by_group, e.number(first, torch.float32, 0), torch.float32)
    else:
        factors = e.dequantise(by_group, e.number(1.0, torch.float32, 0), torch.float32)
        factors = e.binary("PROD", factors, e.constant(by_row, (*ones, *by_row.shape, 1)))
    # TensorRT wants the scales of E2M1 in the dtype of the result; in float32, the products are rounded once.
    return e.cast(e.dequantise(stored, factors, torch.float32), weight.dtype)


def rounded_inputs(e: Emitter, x: Tensor, weight: PackedWeight, capability: tuple[int, int] | None) -> Tensor:
    """Inputs of the weight's product: quantised and dequantised, for TensorRT to multiply the quantised numbers themselves.

    As they are where the weight becomes a constant, or its inputs have no scale.
    """
    packing = weight.packing
    if packing.input_scale is None or not stays_packed(packing, weight.shape[-1], capability):
        return x
    scale = e.number(packing.input_scale, torch.float32, 0)
    if packing.quant_algo == "FP8":
        return e.dequantise(e.quantise(x, scale, STORED["FP8"]), scale, weight.dtype)
    values, by_group = e.quantise_blocks(x, NVFP4_GROUP, scale, STORED["NVFP4"], torch.float8_e4m3fn)
    factors = e.dequantise(by_group, scale, torch.float32)
    return e.cast(e.dequantise(values, factors, torch.float32), weight.dtype)
