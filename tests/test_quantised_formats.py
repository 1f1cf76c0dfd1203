"""Every format of quantised weights, bit for bit against quantisers written from the formats' definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch
from quantisers import Quantiser, Stored, part_name
from tiny_family import CONFIG, write_folder
from torch import Tensor

from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.hf.formats import base
from trtllm_replayssm.errors import CheckpointError

MODULE = "model.layers.0.mixer.in_proj"
WEIGHT = f"{MODULE}.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    groups = {"group_0": scheme | {"input_activations": None, "output_activations": None}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def native(rows: int, columns: int) -> dict[str, Any]:
    block = {"weight_block_size": [rows, columns], "activation_scheme": "dynamic", "fmt": "e4m3"}
    return {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]} | block


#: Description and quantiser of every format, by what the note calls it.
FORMATS: dict[str, tuple[str, dict[str, Any], Quantiser]] = {
    "modelopt nvfp4": ("NVFP4", modelopt("NVFP4", group_size=16), q.nvfp4),
    "modelopt nvfp4 weight-only": ("NVFP4", modelopt("W4A16_NVFP4"), q.nvfp4_weight_only),
    "modelopt nvfp4 awq": ("NVFP4 with AWQ", modelopt("NVFP4_AWQ", pre_quant_scale=True), q.nvfp4_awq),
    "modelopt nvfp4 awq, folded": ("NVFP4 with AWQ", modelopt("NVFP4_AWQ"), q.nvfp4),
    "modelopt nvfp4 svd": ("NVFP4 with SVD", modelopt("NVFP4_SVD", pre_quant_scale=True, lora_rank=4), q.nvfp4_svd),
    "modelopt fp8": ("FP8 per tensor", modelopt("FP8"), q.fp8),
    "modelopt fp8 weight-only": ("FP8 per tensor", modelopt("FP8"), q.fp8_weight_only),
    "modelopt fp8 rows": (
        "FP8 per channel",
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        lambda weight: q.fp8_channel(weight, column=False),
    ),
    "modelopt fp8 blocks": ("FP8 in blocks of 128x128", modelopt("FP8_PB_WO", group_size=128), q.fp8_pb_wo),
    "fp8": (
        "FP8 per tensor",
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": None},
        q.fp8,
    ),
    "fp8 blocks": ("FP8 in blocks of 4x16", native(4, 16), q.fp8_block(4, 16)),
    "fp8 blocks with edges": ("FP8 in blocks of 5x24", native(5, 24), q.fp8_block(5, 24)),
    "fp8 blocks larger than the matrix": ("FP8 in blocks of 128x128", native(128, 128), q.fp8_block(128, 128)),
    "compressed nvfp4": (
        "NVFP4",
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16, strategy="tensor_group"),
        q.compressed_nvfp4,
    ),
    "compressed mxfp4": (
        "MXFP4",
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, strategy="group"),
        q.mxfp4,
    ),
    "compressed int4": (
        "int4 in groups of 32",
        compressed("pack-quantized", num_bits=4, type="int", group_size=32, strategy="group", actorder=None),
        q.int4(32),
    ),
    "compressed int4 rows": (
        "int4 per channel",
        compressed("pack-quantized", num_bits=4, type="int", group_size=None, strategy="channel"),
        q.int4(None),
    ),
    "compressed fp8": (
        "FP8 per tensor",
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor", observer="minmax"),
        q.fp8,
    ),
    "compressed fp8 rows": (
        "FP8 per channel",
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        q.fp8_channel,
    ),
    "compressed fp8 blocks": (
        "FP8 in blocks of 4x16",
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[4, 16]),
        q.fp8_block(4, 16, "weight_scale"),
    ),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def matrix(n: int = 13, k: int = 96, seed: int = 3) -> Tensor:
    """Rows of very different sizes, so that no scale fits its neighbour."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator) * torch.logspace(-4, 2, n).unsqueeze(1)


def folder(path: Path, tensors: dict[str, Tensor], description: dict[str, Any] | None, **config: Any) -> Path:
    more = {"quantization_config": description} if description else {}
    return write_folder(path, {name: t.contiguous() for name, t in tensors.items()}, CONFIG | more | config)


def stored_as(name: str, made: Stored) -> dict[str, Tensor]:
    return {part_name(name, part): tensor for part, tensor in made.tensors.items()}


def same_bits(made: Tensor, expected: Tensor) -> bool:
    return made.dtype == expected.dtype == torch.float32 and torch.equal(
        made.view(torch.int32), expected.contiguous().view(torch.int32)
    )


@every_format
@pytest.mark.parametrize("chunk", [1, 500, 1200, base.CHUNK_ELEMENTS])
def test_a_linear(name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One virtual tensor under the weight's own name, with every bit right, whatever rows are made at once."""
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", chunk)
    label, description, quantise = FORMATS[name]
    made, notes = quantise(matrix()), []
    tensors = stored_as(WEIGHT, made) | {"norm.weight": torch.ones(4)}
    with HfFolder(folder(tmp_path, tensors, description), notes.append) as opened:
        assert opened.shapes == {WEIGHT: (13, 96), "norm.weight": (4,)}
        assert opened.entries[WEIGHT].nbytes == sum(tensor.nbytes for tensor in made.tensors.values())
        assert same_bits(opened.tensor(WEIGHT), made.weight)
        # The quantisation itself is a good one: the formats' own error, and no more.
        error = (made.weight - matrix()).norm(dim=1) / matrix().norm(dim=1)
        assert error[-3:].max() < (0.03 if "fp8" in name else 0.2)
    assert len(notes) == 1
    assert notes[0].endswith(f"1 weights are dequantised on conversion, 1 {label}")


@every_format
def test_experts_one_by_one(name: str, tmp_path: Path) -> None:
    label, description, quantise = FORMATS[name]
    made = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": quantise(matrix(seed=e)) for e in range(3)}
    tensors = {part: tensor for weight, stored in made.items() for part, tensor in stored_as(weight, stored).items()}
    notes: list[str] = []
    with HfFolder(folder(tmp_path, tensors, description), notes.append) as opened:
        for weight, stored in made.items():
            assert same_bits(opened.tensor(weight), stored.weight)
    assert notes[0].endswith(f"3 weights are dequantised on conversion, 3 {label}")


@every_format
def test_fused_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``[E, N, K]`` in one tensor: blocks of scales begin anew with every expert."""
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", 500)
    _, description, quantise = FORMATS[name]
    made = q.stacked(torch.stack([matrix(seed=e) for e in range(3)]), quantise)
    with HfFolder(folder(tmp_path, stored_as(FUSED, made), description), print) as opened:
        assert opened.shapes == {FUSED: (3, 13, 96)}
        assert same_bits(opened.tensor(FUSED), made.weight)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (3, 1, 1)], ids=str)
def test_one_scale_for_all_experts_or_one_for_each(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = q.stacked(torch.stack([matrix(seed=e) for e in range(3)]), q.fp8)
    tensors = stored_as(FUSED, made)
    scales = torch.tensor([0.5, 2.0, 3.0]).view(shape) if 3 in shape else torch.full(shape, 0.25)
    tensors[f"{FUSED}_weight_scale"] = scales
    expected = tensors[FUSED].float() * scales.view(-1, 1, 1)
    with HfFolder(folder(tmp_path, tensors, modelopt("FP8")), print) as opened:
        assert torch.equal(opened.tensor(FUSED), expected)


def test_every_code_of_e2m1(tmp_path: Path) -> None:
    """Low nibble first: byte 0x21 is 0.5 in the even column and 1.0 in the odd one."""
    assert q.E2M1[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    made = q.nvfp4(matrix(16, 32))
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.ones(16, 2).to(torch.float8_e4m3fn)
    tensors = stored_as(WEIGHT, made) | {WEIGHT: codes, f"{MODULE}.weight_scale": scales}
    tensors[f"{MODULE}.weight_scale_2"] = torch.tensor(1.0)
    with HfFolder(folder(tmp_path, tensors, modelopt("NVFP4")), print) as opened:
        read = opened.tensor(WEIGHT).flatten().tolist()
    assert read == [q.E2M1[byte >> shift & 15] for byte in range(256) for shift in (0, 4)]
    assert read[2 * 0x21 : 2 * 0x21 + 2] == [0.5, 1.0]


def test_every_code_of_e4m3(tmp_path: Path) -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).view(2, 127)
    tensors = {WEIGHT: codes.view(torch.float8_e4m3fn), f"{MODULE}.weight_scale": torch.tensor(1.0)}
    with HfFolder(folder(tmp_path, tensors, modelopt("FP8")), print) as opened:
        assert opened.tensor(WEIGHT).flatten().tolist() == [q.E4M3[code] for code in codes.flatten().tolist()]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_power_of_e8m0(tmp_path: Path, dtype: torch.dtype) -> None:
    """From the subnormal 2^-127 on; both dtypes under which the bytes are stored."""
    made = q.mxfp4(matrix(255, 32))
    tensors = stored_as(WEIGHT, made) | {f"{MODULE}.weight_packed": torch.full((255, 16), 0x22, dtype=torch.uint8)}
    tensors[f"{MODULE}.weight_scale"] = torch.arange(255, dtype=torch.uint8).view(255, 1).view(dtype)
    with HfFolder(folder(tmp_path, tensors, FORMATS["compressed mxfp4"][1]), print) as opened:
        assert opened.tensor(WEIGHT)[:, 7].tolist() == [2.0 ** (byte - 127) for byte in range(255)]


def test_smaller_maxima_of_blocks_change_nothing(tmp_path: Path) -> None:
    """Four-over-six: a block's scale may put its largest value at 4. What is stored says so by itself."""
    made = q.nvfp4(matrix())
    doubled = (made.tensors["weight_scale"].float() * 1.5).to(torch.float8_e4m3fn)
    tensors = stored_as(WEIGHT, made) | {f"{MODULE}.weight_scale": doubled}
    share = made.tensors["weight_scale_2"]
    values = torch.tensor(
        [[q.E2M1[b >> s & 15] for b in row for s in (0, 4)] for row in made.tensors["weight"].tolist()]
    )
    expected = values.view(13, 6, 16) * (doubled.float() * share).unsqueeze(2)
    with HfFolder(folder(tmp_path, tensors, modelopt("NVFP4")), print) as opened:
        assert torch.equal(opened.tensor(WEIGHT), expected.flatten(1))


# ---- tensors that do not fit the format ------------------------------------------------------------------------------


def refused(path: Path, *parts: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        HfFolder(path, print)
    message = str(caught.value).replace(str(path), "")
    assert "\n" not in message
    for part in parts:
        assert part in message
    return caught.value


def required_parts() -> list[tuple[str, str]]:
    free = {"input_scale", "input_global_scale", "pre_quant_scale"}
    return [
        (name, part) for name, (_, _, make) in FORMATS.items() for part in make(matrix()).tensors if part not in free
    ]


@pytest.mark.parametrize(("name", "part"), required_parts())
def test_a_missing_tensor(name: str, part: str, tmp_path: Path) -> None:
    label, description, quantise = FORMATS[name]
    tensors = stored_as(WEIGHT, quantise(matrix()))
    del tensors[part_name(WEIGHT, part)]
    refused(folder(tmp_path, tensors, description), MODULE, label, f"lacks {part}")


@pytest.mark.parametrize(("name", "part"), [case for case in required_parts() if case[1] not in q.HOLDERS])
def test_a_scale_of_another_shape(name: str, part: str, tmp_path: Path) -> None:
    """One row more than the values call for."""
    label, description, quantise = FORMATS[name]
    tensors = stored_as(WEIGHT, quantise(matrix()))
    target = part_name(WEIGHT, part)
    rows = tensors[target].reshape(-1, *tensors[target].shape[1:]).contiguous()
    tensors[target] = torch.cat([rows.view(torch.uint8), rows[:1].view(torch.uint8)]).view(rows.dtype)
    refused(folder(tmp_path, tensors, description), MODULE, label, target, f"of shape [{len(rows) + 1}")


@pytest.mark.parametrize(("name", "part"), required_parts())
def test_a_tensor_of_another_dtype(name: str, part: str, tmp_path: Path) -> None:
    label, description, quantise = FORMATS[name]
    tensors = stored_as(WEIGHT, quantise(matrix()))
    target = part_name(WEIGHT, part)
    tensors[target] = torch.zeros(tensors[target].shape, dtype=torch.int8)
    refused(folder(tmp_path, tensors, description), MODULE, label, target, "dtype I8")


SURPLUS = {
    "modelopt nvfp4": ("pre_quant_scale", torch.ones(96)),
    "modelopt nvfp4 awq": ("svdquant_lora_a", torch.ones(4, 96)),
    "modelopt nvfp4 svd": ("weight_scale_inv", torch.ones(1, 1)),
    "modelopt fp8": ("weight_scale_2", torch.tensor(1.0)),
    "fp8 blocks": ("weight_scale", torch.tensor(1.0)),
    "compressed nvfp4": ("weight", torch.ones(13, 96)),
    "compressed int4": ("weight_zero_point", torch.zeros(2, 3, dtype=torch.int32)),
    "compressed int4 rows": ("weight_g_idx", torch.zeros(96, dtype=torch.int32)),
    "compressed mxfp4": ("weight_global_scale", torch.tensor([1.0])),
}


@pytest.mark.parametrize("name", SURPLUS)
def test_a_tensor_too_many(name: str, tmp_path: Path) -> None:
    """Each of these would change the weight: leaving it out would be wrong without a sign."""
    _, description, quantise = FORMATS[name]
    part, tensor = SURPLUS[name]
    tensors = stored_as(WEIGHT, quantise(matrix())) | {f"{MODULE}.{part}": tensor}
    refused(folder(tmp_path, tensors, description), MODULE, f"{MODULE}.{part}", "does not know")


@pytest.mark.parametrize("name", ["modelopt nvfp4", "compressed nvfp4", "compressed mxfp4", "compressed int4"])
def test_a_width_that_blocks_cannot_divide(name: str, tmp_path: Path) -> None:
    _, description, quantise = FORMATS[name]
    tensors = stored_as(WEIGHT, quantise(matrix()))
    for part in q.HOLDERS:
        if (target := f"{MODULE}.{part}") in tensors:
            tensors[target] = tensors[target][:, : 5 if "int4" in name else 20].clone()
    refused(folder(tmp_path, tensors, description), MODULE, "wide")


def test_a_vector_is_no_weight(tmp_path: Path) -> None:
    tensors = {WEIGHT: torch.ones(16).to(torch.float8_e4m3fn), f"{MODULE}.weight_scale": torch.tensor(1.0)}
    refused(folder(tmp_path, tensors, modelopt("FP8")), MODULE, "no matrix")


def test_scales_of_joined_matrices_that_were_quantised_apart(tmp_path: Path) -> None:
    """Two matrices of 6 rows in blocks of 4, one behind the other: 2 + 2 rows of scales, where the whole has 3."""
    parts = [q.fp8_block(4, 16)(matrix(6, seed=e)).tensors for e in range(2)]
    tensors = {
        part_name(FUSED, part): torch.cat([p[part].view(torch.uint8) for p in parts]).view(parts[0][part].dtype)
        for part in parts[0]
    }
    tensors = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    refused(folder(tmp_path, tensors, native(4, 16)), FUSED, "[1, 4, 6]", "[1, 3, 6]")


def test_a_stated_shape_that_the_values_do_not_have(tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, q.int4()(matrix())) | {f"{MODULE}.weight_shape": torch.tensor([13, 95])}
    with HfFolder(folder(tmp_path, tensors, FORMATS["compressed int4"][1]), print) as opened:
        with pytest.raises(CheckpointError, match=r"in_proj .*weight_shape of \[13, 95\]"):
            opened.tensor(WEIGHT)


def test_the_name_of_the_scale_belongs_to_the_format(tmp_path: Path) -> None:
    """weight_scale and weight_scale_inv are not interchangeable."""
    block = stored_as(WEIGHT, q.fp8_block(4, 16, "weight_scale")(matrix()))
    refused(folder(tmp_path / "block", block, native(4, 16)), MODULE, "lacks weight_scale_inv")
    tensor = stored_as(WEIGHT, q.fp8(matrix()))
    tensor[f"{MODULE}.weight_scale_inv"] = tensor.pop(f"{MODULE}.weight_scale")
    refused(folder(tmp_path / "tensor", tensor, modelopt("FP8")), MODULE, "lacks weight_scale")


BLOCKS = {
    "as ModelOpt": ("FP8_PB_WO", "weight_scale", (3, 1, 2, 1)),
    "by the internal name": ("fp8_pb_wo", "weight_scale", (3, 1, 2, 1)),
    "without axes of one": ("FP8_PB_WO", "weight_scale", (3, 2)),
    "as the source of the tensors": ("FP8_PB_WO", "weight_scale_inv", (3, 2)),
    "as TensorRT-LLM": ("FP8_BLOCK_SCALES", "weight_scale_inv", (3, 2)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_modelopts_blocks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of rows and two of columns, the last ones smaller, in all spellings."""
    monkeypatch.setattr(base, "CHUNK_ELEMENTS", 1)
    algorithm, scale, shape = BLOCKS[name]
    made = q.fp8_block(128, 128, scale)(torch.randn(300, 200, generator=torch.Generator().manual_seed(1)))
    tensors = stored_as(WEIGHT, made)
    tensors[f"{MODULE}.{scale}"] = tensors[f"{MODULE}.{scale}"].view(shape)
    with HfFolder(folder(tmp_path, tensors, modelopt(algorithm)), print) as opened:
        assert opened.shapes == {WEIGHT: (300, 200)}
        assert same_bits(opened.tensor(WEIGHT), made.weight)


def test_modelopts_blocks_with_both_scales(tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, q.fp8_pb_wo(matrix())) | {f"{MODULE}.weight_scale_inv": torch.ones(1, 1)}
    refused(folder(tmp_path, tensors, modelopt("FP8_PB_WO")), MODULE, f"{MODULE}.weight_scale,", "does not know")


def test_headers_are_enough(tmp_path: Path) -> None:
    """Nothing is read before a tensor is asked for, and of a weight only what it is made from."""
    made = q.nvfp4(matrix())
    path = folder(tmp_path, stored_as(WEIGHT, made), modelopt("NVFP4"))
    opened = HfFolder(path, print)
    assert opened.files[0].descriptor is None
    read: list[str] = []
    opened.quantised[WEIGHT].read(lambda name: read.append(name) or opened.owners[name].read(name))  # type: ignore
    assert sorted(read) == sorted(f"{MODULE}.{part}" for part in ("weight", "weight_scale", "weight_scale_2"))
    assert json.loads((path / "config.json").read_text())["quantization_config"]["quant_algo"] == "NVFP4"
