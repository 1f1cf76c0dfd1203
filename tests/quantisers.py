"""Quantises small matrices by the definition of every format, one number at a time.

Nothing of the package is used: codes are looked for in the list of all values that a format has, and what is stored is
decoded by the definition again, with every operation rounded to float32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Parts that hold the values.
HOLDERS = ("weight", "weight_packed")
#: E2M1 by code: sign, two bits of exponent with bias 1, one bit of mantissa; exponent 0 is subnormal.
E2M1 = [
    (-1) ** (code >> 3) * ((code & 1) / 2 if not code >> 1 & 3 else (1 + (code & 1) / 2) * 2 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]


def e4m3(code: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; all ones is NaN, there is no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


E4M3 = [e4m3(code) for code in range(256)]


def f32(x: float) -> float:
    """x rounded to float32. A product or quotient of two float32 in double precision is then rounded as float32 does."""
    return struct.unpack("f", struct.pack("f", x))[0]


def e2m1_code(x: float) -> int:
    """The nearest E2M1 value's code, the even one of two as near."""
    return min(range(16), key=lambda code: (abs(E2M1[code] - x), code & 1, code))


def e4m3_codes(values: Tensor) -> list[list[int]]:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def as_e4m3(codes: list[list[int]]) -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Stored:
    """A matrix as a checkpoint has it. tensors: by part. weight: float32, what they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


#: From a matrix ``[N, K]`` to what is stored of it.
Quantiser = Callable[[Tensor], Stored]


def e2m1_blocks(weight: Tensor, scales: list[list[float]], block: int) -> tuple[Tensor, list[list[float]]]:
    """Packed codes ``[N, K/2]``, the low nibble the even column, and the values that they stand for."""
    packed, values = [], []
    for row, row_scales in zip(weight.tolist(), scales):
        codes = [e2m1_code(x / row_scales[k // block] if row_scales[k // block] else 0.0) for k, x in enumerate(row)]
        packed.append([codes[k] | codes[k + 1] << 4 for k in range(0, len(codes), 2)])
        values.append([f32(E2M1[code] * row_scales[k // block]) for k, code in enumerate(codes)])
    return torch.tensor(packed, dtype=torch.uint8), values


def nvfp4_parts(weight: Tensor, combine: Callable[[float], float], share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Packed values, E4M3 block scales, and the weight. combine: from a block scale to what multiplies the values.

    share: the tensor's scale, of which the block scales are multiples.
    """
    blocks = weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / share
    codes = e4m3_codes(blocks)
    scales = [[combine(E4M3[code]) for code in row] for row in codes]
    packed, values = e2m1_blocks(weight, scales, 16)
    return packed, as_e4m3(codes), torch.tensor(values)


def scale_of_inputs(weight: Tensor) -> Tensor:
    """Some number, and not the same for all layers."""
    return torch.tensor((1 + len(weight) % 5) / 4)


def nvfp4(weight: Tensor, input_scale: bool = True) -> Stored:
    """ModelOpt: the tensor's scale is amax / (6 * 448)."""
    share = f32(float(weight.abs().max()) / 2688)
    packed, scales, made = nvfp4_parts(weight, lambda scale: f32(scale * share), share)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(share)}
    return Stored(tensors | ({"input_scale": scale_of_inputs(weight)} if input_scale else {}), made)


def nvfp4_weight_only(weight: Tensor) -> Stored:
    return nvfp4(weight, input_scale=False)


def nvfp4_awq(weight: Tensor) -> Stored:
    """The columns are divided by pre_quant_scale, and the layer's input is multiplied by it."""
    columns = 0.5 + torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(4))
    columns = columns.to(torch.bfloat16)
    inner = nvfp4(weight / columns.float())
    rows = [[f32(x * c) for x, c in zip(row, columns.tolist())] for row in inner.weight.tolist()]
    return Stored(inner.tensors | {"pre_quant_scale": columns}, torch.tensor(rows))


def nvfp4_svd(weight: Tensor) -> Stored:
    """The four largest singular vectors stay in bfloat16; what they leave of the matrix, its columns divided, is quantised."""
    smooth = nvfp4_awq(weight).tensors["pre_quant_scale"]
    divided = weight / smooth.float()
    left, sizes, right = torch.linalg.svd(divided, full_matrices=False)
    b, a = (left[:, :4] * sizes[:4]).to(torch.bfloat16), right[:4].to(torch.bfloat16)
    low_rank = [[f32(math.fsum(x * y for x, y in zip(row, column))) for column in a.t().tolist()] for row in b.tolist()]
    inner = nvfp4(divided - torch.tensor(low_rank))
    made = [
        [f32(f32(x + y) * c) for x, y, c in zip(row, more, smooth.tolist())]
        for row, more in zip(inner.weight.tolist(), low_rank)
    ]
    tensors = {"pre_quant_scale": smooth, "svdquant_lora_a": a.contiguous(), "svdquant_lora_b": b}
    return Stored(inner.tensors | tensors, torch.tensor(made))


def compressed_nvfp4(weight: Tensor) -> Stored:
    """compressed-tensors: the reciprocals of ModelOpt's scalars."""
    inverse = f32(2688 / float(weight.abs().max()))
    packed, scales, made = nvfp4_parts(weight, lambda scale: f32(scale / inverse), 1 / inverse)
    return Stored(
        {
            "weight_packed": packed,
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([inverse]),
            "input_global_scale": torch.tensor([2.7]),
        },
        made,
    )


def mxfp4(weight: Tensor) -> Stored:
    """A power of two for 32 columns, such that the largest value is at most 8 of them."""
    codes = []
    for row in weight.unflatten(1, (-1, 32)).abs().amax(2).tolist():
        codes.append([max(0, math.frexp(largest)[1] - 3 + 127) for largest in row])
    packed, values = e2m1_blocks(weight, [[2.0 ** (code - 127) for code in row] for row in codes], 32)
    tensors = {"weight_packed": packed, "weight_scale": torch.tensor(codes, dtype=torch.uint8)}
    return Stored(tensors, torch.tensor(values))


def e4m3_parts(weight: Tensor, scales: list[list[float]], block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Values and weight. scales: one for a block of rows and columns."""
    codes, values = [], []
    for n, row in enumerate(weight.tolist()):
        own = [scales[n // block[0]][k // block[1]] for k in range(len(row))]
        codes += e4m3_codes(torch.tensor([[x / scale if scale else 0.0 for x, scale in zip(row, own)]]))
        values.append([f32(E4M3[code] * scale) for code, scale in zip(codes[-1], own)])
    return as_e4m3(codes), torch.tensor(values)


def fp8(weight: Tensor, input_scale: bool = True) -> Stored:
    """One scale for the tensor."""
    scale = f32(float(weight.abs().max()) / 448)
    values, made = e4m3_parts(weight, [[scale]], (len(weight), weight.shape[1]))
    extra = {"input_scale": scale_of_inputs(weight)} if input_scale else {}
    return Stored({"weight": values, "weight_scale": torch.tensor(scale)} | extra, made)


def fp8_weight_only(weight: Tensor) -> Stored:
    return fp8(weight, input_scale=False)


def fp8_channel(weight: Tensor, column: bool = True) -> Stored:
    """One scale a row, ``[N, 1]`` in bfloat16 as compressed-tensors has it, or ``[N]`` as ModelOpt does."""
    scales = (weight.abs().amax(1) / 448).to(torch.bfloat16 if column else torch.float32)
    values, made = e4m3_parts(weight, [[scale] for scale in scales.tolist()], (1, weight.shape[1]))
    return Stored({"weight": values, "weight_scale": scales.view(-1, 1) if column else scales}, made)


def fp8_block(rows: int, columns: int, name: str = "weight_scale_inv") -> Quantiser:
    """One scale a block; blocks at the edges may be smaller."""

    def quantise(weight: Tensor) -> Stored:
        n, k = weight.shape
        largest = [
            [f32(float(weight[i : i + rows, j : j + columns].abs().max()) / 448) for j in range(0, k, columns)]
            for i in range(0, n, rows)
        ]
        values, made = e4m3_parts(weight, largest, (rows, columns))
        return Stored({"weight": values, name: torch.tensor(largest)}, made)

    return quantise


def fp8_pb_wo(weight: Tensor) -> Stored:
    """ModelOpt: blocks of 128 x 128, and an axis of one behind each axis of their scales."""
    made = fp8_block(128, 128, "weight_scale")(weight)
    scales = made.tensors["weight_scale"][:, None, :, None].contiguous()
    return Stored(made.tensors | {"weight_scale": scales}, made.weight)


def fp8_blocks(weight: Tensor) -> Stored:
    """The same blocks as other writers store them."""
    return fp8_block(128, 128)(weight)


#: The one scale of a table of n-grams, as large as a published one.
TABLE_SCALE = torch.tensor([0.0002], dtype=torch.bfloat16)


def ngram_shard(weight: Tensor) -> Stored:
    """A shard of a table, whose scale is stored beside the shards."""
    values, made = e4m3_parts(weight, [[float(TABLE_SCALE)]], (len(weight), weight.shape[1]))
    return Stored({"weight": values}, made)


def int4(group: int | None = 32) -> Quantiser:
    """Integers from -8 to 7 plus 8, the first of eight in the lowest bits of a word; None: one scale a row."""

    def quantise(weight: Tensor) -> Stored:
        n, k = weight.shape
        size = group or k
        scales = (weight.unflatten(1, (-1, size)).abs().amax(2) / 7).to(torch.bfloat16)
        words, values = [], []
        for row, row_scales in zip(weight.tolist(), scales.tolist()):
            codes = [max(-8, min(7, round(x / row_scales[j // size]))) for j, x in enumerate(row)]
            values.append([f32(code * row_scales[j // size]) for j, code in enumerate(codes)])
            packed = [sum((codes[j + i] + 8) << 4 * i for i in range(8)) for j in range(0, k, 8)]
            words.append([word - 2**32 if word >= 2**31 else word for word in packed])
        return Stored(
            {
                "weight_packed": torch.tensor(words, dtype=torch.int32),
                "weight_scale": scales,
                "weight_shape": torch.tensor([n, k]),
            },
            torch.tensor(values),
        )

    return quantise


def stacked(matrices: Tensor, quantise: Quantiser) -> Stored:
    """Every matrix of ``[E, N, K]`` by itself, the parts stacked."""
    made = [quantise(matrix) for matrix in matrices]
    parts = {part: torch.stack([stored.tensors[part] for stored in made]) for part in made[0].tensors}
    return Stored(parts, torch.stack([stored.weight for stored in made]))


def quantised(tensors: dict[str, Tensor], choose: Callable[[str], Quantiser | None]) -> tuple[dict[str, Tensor], ...]:
    """The checkpoint with the chosen weights quantised, and with these weights dequantised.

    choose: the quantiser of a weight's name, None to leave it.
    """
    stored, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        quantise = choose(name) if tensor.dim() > 1 else None
        if quantise is None:
            continue
        made = quantise(tensor) if tensor.dim() == 2 else stacked(tensor, quantise)
        del stored[name]
        stored |= {part_name(name, part): part_tensor for part, part_tensor in made.tensors.items()}
        plain[name] = made.weight
    return stored, plain


def part_name(name: str, part: str) -> str:
    """Parts of ``module.weight`` are ``module.part``; fused experts have no module of their own."""
    if name.endswith(".weight"):
        return name.removesuffix("weight") + part
    if part == "weight":
        return name
    return f"{name}_{'scale_inv' if part == 'weight_scale_inv' else part}"
