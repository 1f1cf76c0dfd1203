"""What checkpoints say of their quantisation: names of modules, two files that may differ, and every contradiction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch
from quantisers import part_name
from test_convert import Large
from test_quantised_formats import FORMATS, MODULE, WEIGHT, compressed, folder, matrix, modelopt, refused, stored_as
from tiny_family import CONFIG, TinyFamily, checkpoint_tensors, expected_weights, write_folder
from torch import Tensor

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.descriptions.compressed_tensors import COMPRESSED, MIXED_FORMATS
from trtllm_replayssm.builders.hf.descriptions.modelopt import MIXED, MODELOPT
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.hf.metadata import model_dtype
from trtllm_replayssm.errors import UnsupportedModelError, UserError

NVFP4 = q.nvfp4(matrix())
FP8 = q.fp8(matrix())


def with_file(path: Path, **quantization: Any) -> Path:
    """Adds ModelOpt's file to a folder."""
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    return path


def opened(path: Path) -> tuple[HfFolder, list[str]]:
    notes: list[str] = []
    return HfFolder(path, notes.append), notes


# ---- where the description lives -------------------------------------------------------------------------------------


def test_either_file_and_either_level(tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, NVFP4)
    description = modelopt("NVFP4")
    places = {
        "top": folder(tmp_path / "top", tensors, description),
        "text": folder(tmp_path / "text", tensors, None, text_config={"quantization_config": description}),
        "compression": folder(tmp_path / "compression", tensors, None, compression_config=description),
        "file": with_file(folder(tmp_path / "file", tensors, None), quant_algo="NVFP4", exclude_modules=["lm_head"]),
        "both": with_file(folder(tmp_path / "both", tensors, description), quant_algo="NVFP4"),
        "no method": folder(tmp_path / "method", tensors, {"quant_algo": "NVFP4"}),
    }
    for place, path in places.items():
        assert torch.equal(opened(path)[0].tensor(WEIGHT), NVFP4.weight), place


def test_the_table_of_one_file_wins_over_the_other_file(tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, NVFP4)
    table = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MODULE: {"quant_algo": "NVFP4"}}}
    general = modelopt("FP8", ignore=[MODULE])
    inside = with_file(folder(tmp_path / "a", tensors, general), **table)
    outside = with_file(folder(tmp_path / "b", tensors, {"quant_method": "modelopt", **table}), quant_algo="FP8")
    for path in (inside, outside):
        assert torch.equal(opened(path)[0].tensor(WEIGHT), NVFP4.weight)


def test_the_table_wins_over_the_general_format_and_exclusions_of_its_file(tmp_path: Path) -> None:
    other = "model.layers.0.mixer.out_proj"
    tensors = stored_as(WEIGHT, NVFP4) | stored_as(f"{other}.weight", FP8)
    table = {other: {"quant_algo": "FP8"}}
    path = folder(tmp_path, tensors, modelopt("NVFP4", quantized_layers=table, ignore=[other]))
    assert torch.equal(opened(path)[0].tensor(f"{other}.weight"), FP8.weight)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"quant_algo": "NVFP4"}, {"quant_algo": "FP8"}, ("NVFP4", "FP8 per tensor")),
        ({"quant_algo": "NVFP4"}, {"quant_algo": "NVFP4", "ignore": [MODULE]}, ("NVFP4", "not quantised")),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*in_proj"]}, {"quant_algo": "NVFP4"}, ("not quantised", "NVFP4")),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MODULE: {"quant_algo": "NVFP4"}}},
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MODULE: {"quant_algo": "FP8"}}},
            ("NVFP4", "FP8 per tensor"),
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}},
            {"quant_algo": "NVFP4"},
            ("not quantised", "NVFP4"),
        ),
    ],
    ids=["formats", "exclusion", "glob", "tables", "table without the module"],
)
def test_descriptions_that_disagree(
    first: dict[str, Any], second: dict[str, Any], said: tuple[str, str], tmp_path: Path
) -> None:
    path = folder(tmp_path, stored_as(WEIGHT, NVFP4), {"quant_method": "modelopt", **second})
    refused(with_file(path, **first), "hf_quant_config.json", "config.json: quantization_config", MODULE, *said)


def test_levels_of_a_wrapper_that_disagree(tmp_path: Path) -> None:
    text = {"quantization_config": modelopt("FP8")}
    refused(folder(tmp_path, stored_as(WEIGHT, NVFP4), modelopt("NVFP4"), text_config=text), "text_config", MODULE)


# ---- tensors and description -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [[MODULE], ["model.layers.0.*"], ["in_proj"], ["re:.*mixer.*"]], ids=str)
def test_packed_tensors_of_an_excluded_module(ignored: list[str], tmp_path: Path) -> None:
    path = folder(tmp_path, stored_as(WEIGHT, NVFP4), modelopt("NVFP4", ignore=ignored))
    refused(path, MODULE, "says that it is not quantised", "weight_scale_2")


def test_packed_tensors_of_a_module_that_the_table_lacks(tmp_path: Path) -> None:
    table = {"quantized_layers": {"model.layers.0.mixer.out_proj": {"quant_algo": "NVFP4"}}}
    path = folder(tmp_path, stored_as(WEIGHT, NVFP4), modelopt("MIXED_PRECISION", **table))
    refused(path, MODULE, "says that it is not quantised")


OUT = "model.layers.0.mixer.out_proj"
UP = "model.layers.0.mlp.experts.3.up_proj"
JOINED = "model.layers.0.mlp.experts.gate_up_proj"
SHARD = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_1"
#: Entry of a table, and the plain weight that it calls quantised.
PROMISED: dict[str, tuple[str, str]] = {
    "module": (OUT, f"{OUT}.weight"),
    "block": ("model.layers.0.mlp.experts", f"{UP}.weight"),
    "glob": ("model.layers.*.mlp.experts.*", f"{UP}.weight"),
    "joined experts": (JOINED, JOINED),
    "block of joined experts": ("model.layers.0.mlp.experts", JOINED),
    "fused name": ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.k_proj.weight"),
    "router by its name": ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate.weight"),
    "table of n-grams": (SHARD.rpartition(".")[0], f"{SHARD}.weight"),
}


def table_of(*modules: str, **more: Any) -> dict[str, Any]:
    entry = {"quant_algo": "NVFP4", "group_size": 16}
    return modelopt("MIXED_PRECISION", quantized_layers=dict.fromkeys((MODULE, *modules), entry), **more)


@pytest.mark.parametrize("name", PROMISED)
def test_a_plain_weight_that_the_table_calls_quantised(name: str, tmp_path: Path) -> None:
    """No model can use it; one that leaves it out is none the worse."""
    entry, weight = PROMISED[name]
    tensors = stored_as(WEIGHT, NVFP4) | {weight: torch.ones(*([2] if weight == JOINED else []), 4, 16)}
    reader, _ = opened(folder(tmp_path, tensors, table_of(entry)))
    assert list(reader.refused) == [weight]
    said = str(reader.refused[weight])
    assert f"{weight.removesuffix('.weight')} is NVFP4" in said and f"{weight} is F32 without scales" in said


@pytest.mark.parametrize(
    ("weight", "more"),
    [
        *((f"model.layers.0.{name}.weight", {}) for name in ("mlp.gate", "mlp.shared_expert_gate", "mixer.conv1d")),
        *((f"model.layers.0.{name}.weight", {}) for name in ("input_layernorm", "linear_attn.in_proj_b")),
        ("model.layers.0.self_attn.A_log", {}),
        ("model.layers.0.self_attn.q_proj.weight", {"ignore": ["*.self_attn.*"]}),
        ("model.layers.1.mlp.up_proj.weight", {}),
    ],
)
def test_a_plain_weight_below_a_block_that_never_is_quantised(
    weight: str, more: dict[str, Any], tmp_path: Path
) -> None:
    shape = (1, 1, 4, 1) if "A_log" in weight else (4, 16)
    tensors = stored_as(WEIGHT, NVFP4) | {weight: torch.ones(shape)}
    reader, _ = opened(folder(tmp_path, tensors, table_of("model.layers.0", **more)))
    assert reader.refused == {}


def test_a_plain_weight_under_a_general_format_is_read_as_it_is(tmp_path: Path) -> None:
    """Routers and embeddings are no linear layers, and lists of exclusions need not name them."""
    tensors = stored_as(WEIGHT, NVFP4) | {"model.layers.0.mixer.gate.weight": torch.randn(4, 16)}
    reader, notes = opened(folder(tmp_path, tensors, modelopt("NVFP4")))
    assert torch.equal(reader.tensor("model.layers.0.mixer.gate.weight"), tensors["model.layers.0.mixer.gate.weight"])
    assert notes[0].endswith("1 weights are dequantised on conversion, 1 NVFP4")


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_tensors_that_nothing_describes(name: str, tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, FORMATS[name][2](matrix()))
    error = refused(folder(tmp_path, tensors, None), MODULE, "neither config.json nor hf_quant_config.json")
    assert "BF16" in error.hint


@pytest.mark.parametrize("name", FORMATS)
def test_a_description_of_weights_that_are_not_quantised(name: str, tmp_path: Path) -> None:
    _, description, _ = FORMATS[name]
    refused(folder(tmp_path, {WEIGHT: matrix()}, description), "describes quantised weights", "has none")


def layout(name: str) -> tuple[str, frozenset[str]]:
    """What tells stored formats apart; scales that may be absent do not."""
    label, _, quantise = FORMATS[name]
    free = {"input_scale", "input_global_scale", "pre_quant_scale"}
    # ModelOpt's blocks have both names for their scales.
    free |= {"weight_scale", "weight_scale_inv"} if label.endswith("128x128") else set()
    return label.removesuffix(" with AWQ"), frozenset(quantise(matrix()).tensors) - free


@pytest.mark.parametrize("name", FORMATS)
def test_another_format_than_the_description_says(name: str, tmp_path: Path) -> None:
    """Tensors of each format under the description of every other: never read, and the module is named."""
    tensors = stored_as(WEIGHT, FORMATS[name][2](matrix()))
    others = [other for other in FORMATS if layout(other) != layout(name)]
    assert len(others) >= 13
    for i, other in enumerate(others):
        refused(folder(tmp_path / str(i), tensors, FORMATS[other][1]), MODULE)


def test_a_description_of_the_cache_alone(tmp_path: Path) -> None:
    """Scales of the KV cache are left out with a note; without any description they are left for the accounting."""
    scales = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.1),
        "model.layers.0.self_attn.v_scale": torch.ones(1),
    }
    tensors = {WEIGHT: matrix(), "model.layers.0.self_attn.k_proj.weight": matrix()} | scales
    path = with_file(folder(tmp_path / "a", tensors, None), quant_algo=None, kv_cache_quant_algo="FP8")
    reader, notes = opened(path)
    assert set(reader.entries) == set(tensors) - set(scales)
    assert len(notes) == 1
    assert "left out 2 scales" in notes[0]
    reader, notes = opened(folder(tmp_path / "b", tensors, None))
    assert set(reader.entries) == set(tensors)
    assert notes == []


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("model.layers.0.self_attn.k_scale", torch.zeros(7, 5)),
        ("model.layers.0.self_attn.v_scale", torch.tensor(1, dtype=torch.int8)),
        ("model.layers.0.mlp.x.k_scale", torch.tensor(1.0)),
    ],
    ids=["shape", "dtype", "module"],
)
def test_what_is_no_scale_of_a_cache_is_left_for_the_accounting(name: str, scale: Tensor, tmp_path: Path) -> None:
    tensors = stored_as(WEIGHT, NVFP4) | {"model.layers.0.self_attn.k_proj.weight": matrix(), name: scale}
    reader, notes = opened(folder(tmp_path, tensors, modelopt("NVFP4")))
    assert name in reader.entries
    assert not any("KV cache" in note for note in notes)


# ---- formats that are not read ---------------------------------------------------------------------------------------

NOT_READ = [
    *(
        modelopt(algorithm)
        for algorithm in "W4A16_AWQ W4A8_AWQ W4A8_NVFP4_FP8 W4A8_MXFP4_FP8 MXFP8 W8A16 W8A8_SQ_PER_CHANNEL"
        " mxfp4 NEW".split()
    ),
    *({"quant_method": method} for method in ("awq", "gptq", "bitsandbytes", "mxfp4", "quark", "torchao")),
    compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    compressed("marlin-24", num_bits=4, type="int", strategy="group", group_size=128),
    {"bits": 4, "group_size": 64, "mode": "affine"},
]


@pytest.mark.parametrize("description", NOT_READ, ids=lambda d: d.get("quant_algo") or d.get("quant_method") or "mlx")
def test_formats_are_refused_by_name(description: dict[str, Any], tmp_path: Path) -> None:
    names = (description.get(key) for key in ("quant_algo", "format", "quant_method"))
    named = next(filter(None, (*names, "MLX of 4 bits")))
    error = refused(folder(tmp_path, stored_as(WEIGHT, NVFP4), description), named, "is not read")
    assert isinstance(error, UnsupportedModelError)
    assert "BF16" in error.hint


def test_a_format_of_a_table_is_refused_where_it_is_used(tmp_path: Path) -> None:
    """Its keys may be unknown, too. Other modules are read."""
    new = {"quant_algo": "W4A8_AWQ", "rotation": "hadamard"}
    description = modelopt("MIXED_PRECISION", quantized_layers={OUT: new, MODULE: {"quant_algo": "NVFP4"}})
    tensors = stored_as(WEIGHT, NVFP4) | stored_as(f"{OUT}.weight", FP8)
    reader, notes = opened(folder(tmp_path, tensors, description))
    assert set(reader.entries) == {WEIGHT, f"{OUT}.weight"}
    error = reader.refused[f"{OUT}.weight"]
    assert isinstance(error, UnsupportedModelError) and list(reader.refused) == [f"{OUT}.weight"]
    assert f"{OUT}: quant_algo W4A8_AWQ is not read" in str(error) and "BF16" in error.hint
    assert "1 W4A8_AWQ, which is not read" in notes[0]
    with pytest.raises(UnsupportedModelError, match="W4A8_AWQ"):
        reader.tensor(f"{OUT}.weight")


def test_mlx_is_refused_by_name(tmp_path: Path) -> None:
    values = {"bits": 8, "group_size": 64}
    path = folder(tmp_path, {WEIGHT: matrix()}, values, quantization=values)
    refused(path, "config.json: quantization", "MLX of 8 bits")


def test_the_documentation_names_every_format() -> None:
    text = (Path(__file__).parent.parent / "docs" / "quantised-checkpoints.md").read_text()
    read, unread = text.split("## Formats that are refused")
    for name in (*MODELOPT, MIXED, *COMPRESSED, MIXED_FORMATS):
        assert f"`{name}`" in read, name
    for description in NOT_READ[:9]:
        assert description["quant_algo"] == "NEW" or f"`{description['quant_algo']}`" in unread


def of_class(kind: str, weights: dict[str, Any], *targets: str) -> dict[str, Any]:
    """A compressed-tensors description of one group."""
    description = compressed(kind, **weights)
    description["config_groups"]["group_0"]["targets"] = list(targets)
    return description


NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
INT_WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
WRONG: dict[str, tuple[Any, str]] = {
    "text": ("surprise", "expected an object"),
    "no method": ({"ignore": ["lm_head"]}, "quant_method None"),
    "method": ({"quant_method": ["fp8"]}, "quant_method ['fp8']"),
    "algorithm": (modelopt(7), "quant_algo"),  # type: ignore[arg-type]
    "no algorithm": ({"quant_method": "modelopt", "quantized_layers": {MODULE: {}}}, "quant_algo is missing"),
    "groups alone": ({"quant_method": "modelopt", "config_groups": {"group_0": {}}}, "quant_algo is missing"),
    "mixed without table": (modelopt("MIXED_PRECISION"), "quantized_layers is missing"),
    "table": (modelopt("MIXED_PRECISION", quantized_layers=[MODULE]), "quantized_layers is not an object"),
    "table entry": (modelopt("MIXED_PRECISION", quantized_layers={MODULE: "NVFP4"}), f"no object for {MODULE}"),
    "table group": (
        modelopt("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "NVFP4", "group_size": 32}}),
        "group_size is 32",
    ),
    "groups of another type": (
        modelopt("NVFP4", config_groups={"group_0": {"weights": {"num_bits": 4, "type": "int"}}}),
        "group_0 has weights of 4 bits of type int",
    ),
    "groups of another width": (
        modelopt("NVFP4", config_groups={"group_0": {"weights": {"num_bits": 8, "type": "float"}}}),
        "group_0 has weights of 8 bits of type float",
    ),
    "groups that are none": (modelopt("NVFP4", config_groups=[MODULE]), "config_groups is not an object"),
    "key of a model": (modelopt("NVFP4", chunk_size=64), "chunk_size = 64"),
    "key of a model in the table": (
        modelopt("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "NVFP4", "temperature": 0.5}}),
        "temperature = 0.5",
    ),
    "modules to convert": (
        {"quant_method": "fp8", "modules_to_convert": ["lm_head"]},
        "modules_to_convert names lm_head",
    ),
    "zero point": (modelopt("NVFP4", has_zero_point=True), "has_zero_point is true"),
    "group": (modelopt("NVFP4", group_size=32), "group_size is 32"),
    "unknown key": (modelopt("NVFP4", rotation="hadamard"), "rotation"),
    "unknown key in the table": (
        modelopt("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "NVFP4", "rotate": 1}}),
        "rotate = 1",
    ),
    "exclusions": (modelopt("NVFP4", ignore="lm_head"), "list of module names"),
    "exclusion": (modelopt("NVFP4", exclude_modules=[None]), "list of module names"),
    "block": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    "no block": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    "other FP8": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
    "rotated": (
        compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS) | {"transform_config": {"config_groups": {"u": {}}}},
        "rotated weights",
    ),
    "sparse": (
        compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse-24-bitmask",
    ),
    "no groups": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    "mixed without formats": (compressed("mixed-precision", **NVFP4_WEIGHTS), "format mixed-precision"),
    "asymmetric": (compressed("pack-quantized", **INT_WEIGHTS | {"symmetric": False}), "symmetric"),
    "eight bits": (compressed("pack-quantized", **INT_WEIGHTS | {"num_bits": 8}), "num_bits"),
    "no group size": (compressed("pack-quantized", **INT_WEIGHTS | {"group_size": None}), "group_size is missing"),
    "ordered groups": (compressed("pack-quantized", **INT_WEIGHTS | {"actorder": "group"}), "actorder"),
    "dynamic": (compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS | {"dynamic": True}), "dynamic"),
    "group of 32": (compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS | {"group_size": 32}), "group_size"),
    "strategy": (compressed("float-quantized", num_bits=8, type="float", strategy="token"), "strategy"),
    "structure": (compressed("float-quantized", num_bits=8, type="float", strategy="block"), "block_structure"),
    "no width": (compressed("pack-quantized", **INT_WEIGHTS | {"num_bits": None}), "num_bits is missing"),
    "no type": (compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS | {"type": None}), "type is missing"),
    "key of a model in a group": (compressed("nvfp4-pack-quantized", **NVFP4_WEIGHTS, top_k=2), "top_k = 2"),
    "class": (of_class("nvfp4-pack-quantized", NVFP4_WEIGHTS, "Linear", "Attention"), "modules of class Attention"),
    "no targets": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": [], "weights": INT_WEIGHTS}},
        },
        "targets names no modules",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_descriptions_that_are_not_understood(name: str, tmp_path: Path) -> None:
    description, what = WRONG[name]
    refused(folder(tmp_path, stored_as(WEIGHT, NVFP4), description), "quantization_config", what)


@pytest.mark.parametrize(
    "text",
    [
        *("not JSON", "[]", "{}", '{"quantization": 3}', '{"quantization": {"quant_algo": []}}'),
        '{"quantization": {"quant_algo": "NVFP4"}, "rotation": "hadamard"}',
    ],
)
def test_a_damaged_file_of_modelopt(text: str, tmp_path: Path) -> None:
    path = folder(tmp_path, stored_as(WEIGHT, NVFP4), None)
    (path / "hf_quant_config.json").write_text(text)
    refused(path, "hf_quant_config.json")


@pytest.mark.parametrize(
    ("targets", "module", "quantised"),
    [
        (["Linear"], "model.layers.0.mlp.up_proj", True),
        (["Linear"], "model.language_model.embed_tokens", False),
        (["Embedding"], "model.language_model.embed_tokens", True),
        (["Embedding"], "backbone.embeddings", True),
        (["Embedding"], "model.layers.0.mlp.up_proj", False),
        (["Embedding"], "mtp.fc_embedding", False),
        (["Embedding", "re:.*up_proj"], "model.layers.0.mlp.up_proj", True),
        (["Linear", "Embedding"], "lm_head.embed_tokens", True),
    ],
)
def test_classes_that_groups_are_for(targets: list[str], module: str, quantised: bool, tmp_path: Path) -> None:
    tensors = stored_as(f"{module}.weight", q.compressed_nvfp4(matrix()))
    path = folder(tmp_path, tensors, of_class("nvfp4-pack-quantized", NVFP4_WEIGHTS, *targets) | {"ignore": []})
    if quantised:
        assert f"{module}.weight" in opened(path)[0].quantised
    else:
        refused(path, module, "says that it is not quantised")


def test_a_group_of_names_goes_before_one_of_classes(tmp_path: Path) -> None:
    description = of_class("mixed-precision", NVFP4_WEIGHTS, "Linear")
    description["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"
    float8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    description["config_groups"]["group_1"] = {
        "targets": ["re:.*in_proj"],
        "format": "float-quantized",
        "weights": float8,
    }
    tensors = stored_as(WEIGHT, q.fp8_channel(matrix())) | stored_as(f"{OUT}.weight", q.compressed_nvfp4(matrix()))
    reader, _ = opened(folder(tmp_path, tensors, description))
    assert reader.quantised[WEIGHT].format.label == "FP8 per channel"
    assert reader.quantised[f"{OUT}.weight"].format.label == "NVFP4"


def test_a_table_in_one_of_two_files(tmp_path: Path) -> None:
    """The other may say MIXED_PRECISION and no more; both may not."""
    tensors, table = stored_as(WEIGHT, NVFP4), {MODULE: {"quant_algo": "NVFP4"}}
    bare: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": {"x": 1}}
    path = with_file(
        folder(tmp_path / "a", tensors, {"quant_method": "modelopt", **bare}), **bare, quantized_layers=table
    )
    assert torch.equal(opened(path)[0].tensor(WEIGHT), NVFP4.weight)
    path = with_file(
        folder(tmp_path / "b", tensors, {"quant_method": "modelopt", **bare, "quantized_layers": table}), **bare
    )
    assert torch.equal(opened(path)[0].tensor(WEIGHT), NVFP4.weight)
    path = with_file(folder(tmp_path / "c", tensors, {"quant_method": "modelopt", **bare}), **bare)
    refused(path, "quantized_layers is missing")


def test_both_keys_for_exclusions_of_fp8(tmp_path: Path) -> None:
    for key in ("modules_to_not_convert", "ignored_layers"):
        path = folder(tmp_path / key, stored_as(WEIGHT, FP8), {"quant_method": "fp8", key: ["in_proj"]})
        refused(path, MODULE, "says that it is not quantised")


VALUES = (None, True, -1, 0, 3, 0.5, "x", [], [None], [1], {}, {"a": 1}, ["re:("], {"a": {"weights": {}}})


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_a_description_holds_the_answer_is_a_sentence(name: str, tmp_path: Path) -> None:
    """Every key of every level with values of every type: a checkpoint that is read, or a UserError."""
    _, description, quantise = FORMATS[name]
    description = json.loads(json.dumps(description))
    tensors = stored_as(WEIGHT, quantise(matrix(4, 32)))
    path = folder(tmp_path, tensors, None)
    levels = [description]
    for level in levels:
        levels += [value for value in level.values() if isinstance(value, dict)]
    for level in levels:
        for key, value in list(level.items()):
            for wrong in VALUES:
                level[key] = wrong
                (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": description}))
                with suppress(UserError):
                    HfFolder(path, lambda message: None)
            level[key] = value


# ---- the rest of the conversion --------------------------------------------------------------------------------------


def test_dtype_of_activations(tmp_path: Path) -> None:
    """config.json's, or else that of the weights in full precision; scales do not count."""
    tensors = stored_as(WEIGHT, NVFP4) | {"norm.weight": torch.ones(4, dtype=torch.float16)}
    said = folder(tmp_path / "said", tensors, modelopt("NVFP4"), dtype=None, torch_dtype="bfloat16")
    silent = folder(tmp_path / "silent", tensors, modelopt("NVFP4"), dtype=None)
    assert model_dtype(opened(said)[0], "auto") == "bfloat16"
    assert model_dtype(opened(silent)[0], "auto") == "float16"
    assert model_dtype(opened(silent)[0], "float32") == "float32"


MEASURE = """
import sys
from pathlib import Path
from test_convert import Large, run
def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
folder = Path(sys.argv[1])
run(folder / "small", folder / "first", dtype="bfloat16", tp_size=2)  # libraries are loaded and warm
before = peak()
run(folder / "large", folder / "second", Large, dtype="bfloat16", tp_size=2)
print(peak() - before)
"""


def random_nvfp4(tensor: Tensor) -> dict[str, Tensor]:
    """Parts of a weight of that shape, without the time that a real quantisation takes."""
    n, k = tensor.shape
    scales = torch.rand(n, k // 16).to(torch.float8_e4m3fn)
    codes = torch.randint(256, (n, k // 2), dtype=torch.uint8)
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(0.01)}


def packed_folder(path: Path, family: TinyFamily, shards: int) -> int:
    """Every matrix with blocks of 16 as NVFP4; returns the bytes of the largest weight in float32."""
    largest, stored = 0, {}
    for name, tensor in checkpoint_tensors(expected_weights(family)).items():
        if tensor.dim() == 2 and tensor.shape[1] % 16 == 0 and "conv" not in name:
            largest = max(largest, tensor.nbytes)
            stored |= {part_name(name, part): made for part, made in random_nvfp4(tensor).items()}
        else:
            stored[name] = tensor
    write_folder(path, stored, CONFIG | {"quantization_config": modelopt("NVFP4", ignore=[])}, shards)
    return largest


def test_peak_memory_is_about_the_largest_weight(tmp_path: Path) -> None:
    """One weight in float32 at a time, although the checkpoint dequantised would be 340 MB."""
    packed_folder(tmp_path / "small", TinyFamily(HfConfig(CONFIG), {}), 0)
    largest = packed_folder(tmp_path / "large", Large(HfConfig(CONFIG), {}), 3)
    assert largest > 20e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert largest / 2 < int(done.stdout) < 3 * largest, f"peak memory grew by {int(done.stdout) / 1e6:.0f} MB"
