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
from trtllm_replayssm.builders.hf.description import COMPRESSED, MIXED, MIXED_FORMATS, MODELOPT
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.hf.metadata import model_dtype
from trtllm_replayssm.builders.hf.module_names import ModulePatterns, ModuleTable, canonical
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError

NVFP4 = q.nvfp4(matrix())
FP8 = q.fp8(matrix())


def with_file(path: Path, **quantization: Any) -> Path:
    """Adds ModelOpt's file to a folder."""
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    return path


def opened(path: Path) -> tuple[HfFolder, list[str]]:
    notes: list[str] = []
    return HfFolder(path, notes.append), notes


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        # Wrappers on either side.
        ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mixer", "backbone.layers.0.mixer.in_proj", True),
        ("model.lm_head", "lm_head", True),
        # Whole components only, and the layer that is meant.
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.q_proj", False),
        ("mtp", "mtp.layers.0.self_attn.q_proj", True),
        ("model.visual", "model.visual.blocks.0.attn.qkv", True),
        # Ends of names, as Ling abbreviates them.
        ("b_proj", "model.layers.3.attention.b_proj", True),
        ("b_proj", "model.layers.3.attention.kv_b_proj", False),
        ("5.attention.g_proj", "model.layers.5.attention.g_proj", True),
        ("5.attention.g_proj", "model.layers.15.attention.g_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        # Projections that servers fuse.
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_a", True),
        ("model.layers.0.linear_attn.in_proj_ba", "model.layers.0.linear_attn.in_proj_qkv", False),
        ("qkv_proj", "model.layers.0.self_attn.k_proj", True),
        ("qkv_proj", "model.layers.0.self_attn.o_proj", False),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj", True),
        # Globs.
        ("*.conv1d", "backbone.layers.0.mixer.conv1d", True),
        ("backbone.layers.4*", "backbone.layers.4.mixer.in_proj", True),
        ("model.layers.4.*", "backbone.layers.4.mixer.in_proj", True),
        ("model.layers.4.*", "backbone.layers.14.mixer.in_proj", False),
        ("mtp*", "mtp.layers.0.eh_proj", True),
        ("*lm_head*", "language_model.lm_head", True),
        ("lm_head*", "model.layers.0.mlp.up_proj", False),
        # Expressions start at the beginning of a spelling of the name.
        ("re:.*self_attn.*_proj$", "model.language_model.layers.0.self_attn.q_proj", True),
        ("re:model\\.layers\\.\\d\\.mlp", "model.language_model.layers.0.mlp.up_proj", True),
        ("re:layers\\.0", "backbone.layers.0.mixer", True),
        ("re:up_proj", "model.layers.0.mlp.up_proj", False),
        ("re:.*experts.*", "model.layers.0.mlp.shared.up_proj", False),
    ],
)
def test_patterns(pattern: str, module: str, matches: bool) -> None:
    assert ModulePatterns([pattern], "here").match(module) is matches
    assert ModulePatterns(["other", pattern, "re:none", "no*"], "here").match(module) is matches


def test_canonical_names() -> None:
    assert canonical("model.language_model.layers.0.x") == "layers.0.x"
    assert canonical("mtp.layers.0.x") == "mtp.layers.0.x"
    assert canonical("lm_head") == canonical("language_model.lm_head") == "lm_head"
    assert canonical("model") == "model"


def test_tables_know_modules_and_the_blocks_around_them() -> None:
    table = ModuleTable({"model.layers.0.mlp": 1, "model.layers.0.mlp.up_proj": 2, "model.layers.*.out": 3}, "here")
    assert table.find("backbone.layers.0.mlp.up_proj") == (2,)
    assert table.find("model.layers.0.mlp.experts.3.down_proj") == (1,)
    assert table.find("model.layers.7.out") == (3,)
    assert table.find("model.layers.1.mlp.up_proj") == ()
    assert table.named("model.layers.0.mlp.up_proj")
    assert not table.named("model.layers.0.mlp.down_proj")
    fused = ModuleTable({"model.layers.0.qkv_proj": 4}, "here")
    assert fused.find("model.layers.0.k_proj") == (4,)


def test_a_table_that_contradicts_itself() -> None:
    with pytest.raises(CheckpointError, match=r"describes model\.layers\.0\.up twice"):
        ModuleTable({"layers.0.up": 1, "model.layers.0.up": 2}, "here")


def test_an_expression_that_is_none() -> None:
    with pytest.raises(CheckpointError, match="re:\\( is no regular expression"):
        ModulePatterns(["re:("], "here")


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


def test_a_plain_weight_that_the_table_calls_quantised(tmp_path: Path) -> None:
    other = "model.layers.0.mixer.out_proj"
    table = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in (MODULE, other)}
    tensors = stored_as(WEIGHT, NVFP4) | {f"{other}.weight": torch.ones(4, 16)}
    path = folder(tmp_path, tensors, modelopt("MIXED_PRECISION", quantized_layers=table))
    refused(path, f"{other} is NVFP4", f"{other}.weight is F32 without scales")


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
    tensors = {WEIGHT: matrix()} | scales
    path = with_file(folder(tmp_path / "a", tensors, None), quant_algo=None, kv_cache_quant_algo="FP8")
    reader, notes = opened(path)
    assert set(reader.entries) == {WEIGHT}
    assert len(notes) == 1
    assert "left out 2 scales" in notes[0]
    reader, notes = opened(folder(tmp_path / "b", tensors, None))
    assert set(reader.entries) == set(tensors)
    assert notes == []


# ---- formats that are not read ---------------------------------------------------------------------------------------

NOT_READ = [
    *(
        modelopt(algorithm)
        for algorithm in "W4A16_AWQ W4A8_AWQ W4A8_NVFP4_FP8 W4A8_MXFP4_FP8 MXFP8 W8A16 W8A8_SQ_PER_CHANNEL"
        " fp8_pb_wo mxfp4 NEW".split()
    ),
    modelopt("MIXED_PRECISION", quantized_layers={MODULE: {"quant_algo": "W4A8_AWQ"}}),
    *({"quant_method": method} for method in ("awq", "gptq", "bitsandbytes", "mxfp4", "quark", "torchao")),
    compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    compressed("marlin-24", num_bits=4, type="int", strategy="group", group_size=128),
    {"bits": 4, "group_size": 64, "mode": "affine"},
]


@pytest.mark.parametrize("description", NOT_READ, ids=lambda d: d.get("quant_algo") or d.get("quant_method") or "mlx")
def test_formats_are_refused_by_name(description: dict[str, Any], tmp_path: Path) -> None:
    text = json.dumps(description)
    names = ("W4A8_AWQ",) if "W4A8_AWQ" in text else (description.get("quant_algo"), description.get("format"))
    named = next(filter(None, (*names, description.get("quant_method"), "MLX of 4 bits")))
    error = refused(folder(tmp_path, stored_as(WEIGHT, NVFP4), description), named, "is not read")
    assert isinstance(error, UnsupportedModelError)
    assert "BF16" in error.hint


def test_mlx_is_refused_by_name(tmp_path: Path) -> None:
    values = {"bits": 8, "group_size": 64}
    path = folder(tmp_path, {WEIGHT: matrix()}, values, quantization=values)
    refused(path, "config.json: quantization", "MLX of 8 bits")


def test_the_documentation_names_every_format() -> None:
    text = (Path(__file__).parent.parent / "docs" / "quantised-checkpoints.md").read_text()
    read, unread = text.split("## Formats that are refused")
    for name in (*MODELOPT, MIXED, *COMPRESSED, MIXED_FORMATS):
        assert f"`{name}`" in read, name
    for description in NOT_READ[:10]:
        assert description["quant_algo"] == "NEW" or f"`{description['quant_algo']}`" in unread


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
    "text", ["not JSON", "[]", "{}", '{"quantization": 3}', '{"quantization": {"quant_algo": []}}']
)
def test_a_damaged_file_of_modelopt(text: str, tmp_path: Path) -> None:
    path = folder(tmp_path, stored_as(WEIGHT, NVFP4), None)
    (path / "hf_quant_config.json").write_text(text)
    refused(path, "hf_quant_config.json")


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
