"""Checkpoints that stay quantised: every weight stands for what the dequantised twin holds, and what is damaged is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch
import torch.distributed as dist
from hf_models import MODELS, random_ids
from quantised_recipes import NATIVE, RECIPES, Recipe, folders, in_config, mixed, relabelled
from safetensors.torch import load_file, save_file
from test_parity import absorb, case, spoiled_session
from test_quantised_families import DAMAGE
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert, padded
from trtllm_replayssm.builders.families.base import Source, rows
from trtllm_replayssm.builders.keeping import is_multiplied, row_order
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.parallel import Parameter, Segment
from trtllm_replayssm.errors import CheckpointError, EngineError, UserError
from trtllm_replayssm.inspection import inspect_model
from trtllm_replayssm.network.packed import PackedWeight, Packing, dense
from trtllm_replayssm.plugins.reference.read_copy import unpack_e2m1
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.subject import checkpoint_subject

#: Published recipes, and those whose groups fit the tiny widths on two ranks, too.
KEPT = RECIPES | {
    "qwen3.5 moe fp8 in small blocks": Recipe(
        "qwen3_5_moe_vl",
        [(r"in_proj_[ab]|lm_head|mtp\.|shared_expert_gate", None), ("", q.fp8_block(24, 16))],
        lambda modules: in_config(
            **NATIVE | {"weight_block_size": [24, 16]},
            modules_to_not_convert=["visual", "lm_head", "in_proj_a", "in_proj_b", "mtp"],
        ),
        "",
    ),
    # Experts in one tensor, each with a scale of its own.
    "qwen3.5 moe nvfp4 and fp8, fused": Recipe(
        "qwen3_5_moe_vl",
        [(r"mtp|lm_head|linear_attn|shared_expert", None), (r"experts\.down_proj", q.fp8), ("", q.nvfp4)],
        lambda m: in_config(quant_method="modelopt", **mixed(m)),
        "",
    ),
    "falcon nvfp4": Recipe(
        "falcon_h1", [(r"lm_head", None), ("", q.nvfp4)], lambda m: in_config(quant_method="modelopt", **mixed(m)), ""
    ),
    **{
        f"falcon {quantise.__name__}": Recipe(
            "falcon_h1",
            [(r"lm_head", None), (r"feed_forward", quantise), ("", q.nvfp4)],
            lambda m: in_config(quant_method="modelopt", **mixed(m)),
            "",
        )
        for quantise in (q.nvfp4_awq, q.nvfp4_svd)
    },
    "kimi fp8": Recipe(
        "kimi_linear",
        [(r"lm_head|A_log", None), ("", q.fp8)],
        lambda m: in_config(quant_method="modelopt", **mixed(m)),
        "",
    ),
}
#: One of each format, dense and with experts.
SAMPLES = (
    *("nemotron super", "nemotron nano 4b", "qwen3.5 moe fp8 in small blocks", "falcon nvfp4", "kimi fp8"),
    "qwen3.5 compressed",
)
sample = pytest.mark.parametrize("name", SAMPLES)


def kept(packed: Path, target: Path, **options: Any) -> tuple[CheckpointConfig, list[str]]:
    warnings: list[str] = []
    return convert(packed, target, warn=warnings.append, quantization="keep", **options), warnings


def same_values(kept_dir: Path, plain_dir: Path, ranks: int) -> None:
    for rank in range(ranks):
        mine, twin = load_rank(kept_dir, rank), load_rank(plain_dir, rank)
        every = {name: dense(weight) for name, weight in mine.items()}
        for name in [name for name in every if name.endswith(".gates.weight")]:
            joined = name.replace("gates", "in_proj")
            every[joined] = torch.cat((every[joined], every.pop(name)))
        assert every.keys() == twin.keys()
        for name, values in every.items():
            assert values.dtype == twin[name].dtype, name
            assert torch.equal(values, twin[name]), name


@pytest.mark.parametrize("name", KEPT)
def test_weights_are_those_of_the_dequantised_twin(name: str, tmp_path: Path) -> None:
    """Bit for bit, cut for one rank and for two; what cannot be kept is dequantised, with a reason."""
    packed, plain = folders(KEPT[name], tmp_path)
    for ranks in (1, 2):
        config, warnings = kept(packed, tmp_path / "kept", tp_size=ranks)
        convert(plain, tmp_path / "twin", tp_size=ranks, warn=lambda message: None)
        same_values(tmp_path / "kept", tmp_path / "twin", ranks)
        reasons = [warning for warning in warnings if warning.startswith("dequantised all the same")]
        assert config.packings or reasons
        assert bool(config.packings) == any(warning.startswith("kept quantised") for warning in warnings)
    assert any("are kept where they can be" in warning for warning in warnings)


FORMATS = {
    "nemotron super": {("FP8", None), ("NVFP4", 16)},
    "nemotron nano 4b": {("FP8", None), ("NVFP4", 16)},
    "qwen3.5 moe fp8 in small blocks": {("FP8", 16)},
    "falcon nvfp4": {("NVFP4", 16)},
    "qwen3.5 moe nvfp4 and fp8, fused": {("FP8", None), ("NVFP4", 16)},
    "kimi fp8": {("FP8", None)},
    "qwen3.5 compressed": {("FP8", None), ("NVFP4", 16)},
    "kimi mxfp4": set(),
    "ling int4": set(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_which_formats_are_kept(name: str, tmp_path: Path) -> None:
    """As TensorRT-LLM names them in config.json."""
    packed, _ = folders(KEPT[name], tmp_path)
    config, _ = kept(packed, tmp_path / "kept")
    assert {(packing.quant_algo, packing.group_size) for packing in config.packings.values()} == FORMATS[name]
    algorithms = {algorithm for algorithm, _ in FORMATS[name]}
    stated = json.loads((tmp_path / "kept/config.json").read_text())["quantization"]["quant_algo"]
    assert stated == ("MIXED_PRECISION" if len(algorithms) == 2 else next(iter(algorithms), None))


def engine(checkpoint: Path, folder: Path) -> Engine:
    build_engine(checkpoint, folder, BuildOptions(max_batch_size=2, max_seq_len=16, max_num_tokens=64))
    return Engine.load(folder, device="cpu")


@sample
def test_logits_are_those_of_the_dequantised_twin(name: str, tmp_path: Path) -> None:
    """Through build and load, bit for bit, in the dtype of the checkpoint."""
    packed, plain = folders(KEPT[name], tmp_path)
    kept(packed, tmp_path / "kept")
    convert(plain, tmp_path / "twin", warn=lambda message: None)
    ids, logits = random_ids(2, 12), []
    for checkpoint in ("kept", "twin"):
        logits.append(absorb(Session(engine(tmp_path / checkpoint, tmp_path / f"{checkpoint}.engine")), ids))
    assert torch.equal(*logits)


def test_scaled_products_of_a_converted_engine(tmp_path: Path) -> None:
    """From the checkpoint's own FP8 weights: other logits, within what rounding activations does."""
    packed, _ = folders(KEPT["kimi fp8"], tmp_path)
    kept(packed, tmp_path / "kept")
    exact = engine(tmp_path / "kept", tmp_path / "engine")
    scaled = Engine.load(tmp_path / "engine", device="cpu", scaled_matmul=True)
    mine, expected = (absorb(Session(loaded), random_ids(2, 12)).float() for loaded in (scaled, exact))
    assert 1e-3 < (mine - expected).norm() / expected.norm() < 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scaled_products_that_no_layer_would_have_are_refused(tmp_path: Path, dtype: str) -> None:
    """They are products of FP8 numbers for activations in bfloat16."""
    packed, _ = folders(KEPT["kimi fp8"], tmp_path)
    kept(packed, tmp_path / "kept", dtype=dtype)
    engine(tmp_path / "kept", tmp_path / "engine")
    with pytest.raises(EngineError, match="no FP8 matrices with a scale a row, for activations in bfloat16"):
        Engine.load(tmp_path / "engine", device="cpu", scaled_matmul=True)


@dataclass(frozen=True)
class Job:
    """Engines of two ranks below ``root``; each rank writes its logits beside them."""

    root: Path
    ids: Tensor


def run_both(job: Job) -> int:
    for name in ("kept", "twin"):
        logits = absorb(Session(Engine.load(job.root / f"{name}.engine", device="cpu")), job.ids)
        save_file({"logits": logits.contiguous()}, job.root / f"{name}.{dist.get_rank()}")
    return 0


def test_two_ranks_equal_the_dequantised_twin(tmp_path: Path) -> None:
    """Bit for bit, from parts of FP8 and NVFP4 weights that are cut by rows and by columns."""
    packed, plain = folders(KEPT["nemotron super"], tmp_path)
    config, _ = kept(packed, tmp_path / "kept", tp_size=2)
    parameters = config.decoder.parameters(2)
    assert {parameters[name].axis for name in config.packings} >= {0, 1, 2}
    convert(plain, tmp_path / "twin", tp_size=2, warn=lambda message: None)
    for name in ("kept", "twin"):
        options = BuildOptions(max_batch_size=2, max_seq_len=16, max_num_tokens=64)
        build_engine(tmp_path / name, tmp_path / f"{name}.engine", options)
    assert run_ranks(2, run_both, Job(tmp_path, random_ids(2, 12)), "cpu") == 0
    for rank in range(2):
        mine, twin = (load_file(tmp_path / f"{name}.{rank}")["logits"] for name in ("kept", "twin"))
        assert torch.equal(mine, twin)
        assert mine.std() > 0.1


@sample
def test_bytes_are_as_many_as_inspect_says(name: str, tmp_path: Path) -> None:
    """FP8 takes about 8 bits a weight, NVFP4 about 4.5, scales included; the file is as large as their sum."""
    packed, _ = folders(KEPT[name], tmp_path)
    for ranks in (1, 2):
        config, _ = kept(packed, tmp_path / "kept", tp_size=ranks)
        report = inspect_model(checkpoint_subject(config))
        stored = load_file(tmp_path / "kept/rank0.safetensors")
        assert report.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
        assert report.weight_bytes == sum(weight.nbytes for weight in load_rank(tmp_path / "kept", 0).values())
        by_layer = sum(t.nbytes for n, t in stored.items() if n.startswith("transformer.layers."))
        assert report.total("weight_bytes") == by_layer
        # A scale of 32 bits for a row of 16 columns, the narrowest here, is 2 bits a weight; for one of 16-column groups, too.
        assert report.bits_per_weight
        for algorithm, bits in report.bits_per_weight.items():
            least = {"FP8": 8.0, "NVFP4": 4.5}[algorithm]
            assert least < bits <= least + 2


def test_inspect_prints_bits_per_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trtllm_replayssm.cli.main import main

    packed, _ = folders(KEPT["falcon nvfp4"], tmp_path)
    arguments = [
        "convert",
        "--model_dir",
        str(packed),
        "--output_dir",
        str(tmp_path / "kept"),
        "--quantization",
        "keep",
    ]
    assert main(arguments) == 0
    assert re.search(r"weights .* a rank, NVFP4, (bfloat16|float32), 1 rank", capsys.readouterr().out)
    assert main(["inspect", str(tmp_path / "kept")]) == 0
    assert re.search(r"weights: .*, NVFP4 with [45]\.\d\d bits a weight", capsys.readouterr().out)


@pytest.mark.parametrize("name", MODELS)
def test_kept_weights_are_multiplied_with_and_nothing_else(name: str) -> None:
    """A packed weight in the place of every one that may be kept: no other op of any family can take it."""
    tiny = case(name)
    parameters = tiny.engine.config.checkpoint.decoder.parameters()
    weights = {n: packed_fp8(w) if is_multiplied(n, parameters[n]) else w for n, w in tiny.engine.weights.items()}
    assert sum(isinstance(weight, PackedWeight) for weight in weights.values()) >= len(tiny.engine.decoder.layers)
    values = {n: dense(w) for n, w in weights.items()}
    logits = [
        absorb(spoiled_session(replace(tiny.engine, weights=either)), tiny.ids[:, :9]) for either in (weights, values)
    ]
    assert torch.equal(*logits)


def packed_fp8(weight: Tensor) -> PackedWeight:
    scales = weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-3) / 448
    return PackedWeight(Packing("FP8"), ((weight / scales).to(torch.float8_e4m3fn), scales), weight.dtype)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_e2m1_without_a_table() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    expected = [[q.E2M1[code] for byte in row for code in (byte & 15, byte >> 4)] for row in every.tolist()]
    assert torch.equal(unpack_e2m1(every), torch.tensor(expected))


def test_last_group_may_have_fewer_columns() -> None:
    values = torch.arange(1.0, 11).to(torch.float8_e4m3fn).view(2, 5)
    scales = torch.tensor([[1.0, 2, 4], [0.5, 1, 2]])
    weight = PackedWeight(Packing("FP8", 2), (values, scales), torch.float32)
    assert dense(weight).tolist() == [[1, 2, 6, 8, 20], [3, 3.5, 8, 9, 20]]


@pytest.mark.parametrize(
    "packing", [Packing("FP8"), Packing("FP8", 16), Packing("NVFP4", 16), Packing("NVFP4", 16, divides=True)], ids=str
)
def test_rows_that_fill_up_a_vocabulary_are_zeros(packing: Packing) -> None:
    """A scale of zero would divide by zero."""
    parts = []
    for (dtype, shape), value in zip(packing.layout("x", (3, 32)).values(), packing.padding, strict=True):
        parts.append(padded(torch.full(shape, 2.0).to(dtype), (5, *shape[1:]), value))
    values = dense(PackedWeight(packing, tuple(parts), torch.float32))
    assert values.shape == (5, 32) and (values[3:] == 0).all() and values[:3].isfinite().all() and values[:3].any()


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (None, [0, 1, 2, 3]),
        (lambda x: x.flip(0), [3, 2, 1, 0]),
        (lambda x: x[[2, 2]], [2, 2]),
        (lambda x: x.flip(1), None),
        (lambda x: 2 * x, None),
        (lambda x: x.t(), None),
        (lambda x: x.unflatten(0, (2, 2)), None),
    ],
)
def test_scales_follow_rows_only(make: Callable[..., Tensor] | None, order: list[int] | None) -> None:
    found = row_order(Source(("x",), make), ((4, 6),))
    assert (None if found is None else found.tolist()) == order


def test_rows_of_several_tensors_are_counted_through() -> None:
    found = row_order(rows("x", "y"), ((2, 6), (3, 6)))
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["qwen3.5 fp8", "qwen3-next fp8", "qwen3.5 compressed", "qwen3.6 moe nvfp4"])
def test_gates_in_full_precision_stand_apart(name: str, tmp_path: Path) -> None:
    """q, k, v and z of Gated DeltaNet are kept although b and a, in one projection with them, never are quantised; nothing is
    divided where the whole projection is in one format."""
    packed, plain = folders(KEPT[name], tmp_path)
    config, warnings = kept(packed, tmp_path / "kept", tp_size=2)
    layers = {prefix: layer for prefix, layer in config.decoder.named_layers() if isinstance(layer, GatedDelta)}
    assert len(layers) == 3
    quantised = name != "qwen3.6 moe nvfp4"
    for prefix, layer in layers.items():
        assert layer.gates_apart == quantised == (f"{prefix}.in_proj.weight" in config.packings)
        assert f"{prefix}.gates.weight" not in config.packings
    assert not any("joined from parts" in warning for warning in warnings)
    assert CheckpointConfig.read(tmp_path / "kept").decoder == config.decoder
    whole, _ = kept(plain, tmp_path / "whole")
    assert not any(layer.gates_apart for _, layer in whole.decoder.named_layers() if isinstance(layer, GatedDelta))


def test_nothing_to_keep_is_said(tmp_path: Path) -> None:
    _, plain = folders(KEPT["falcon nvfp4"], tmp_path)
    config, warnings = kept(plain, tmp_path / "kept")
    assert not config.packings and warnings[-1] == "no weight is quantised, so that --quantization keep changes nothing"


def test_scales_of_inputs_are_those_of_all_parts(tmp_path: Path) -> None:
    """The largest, where projections with the same inputs are fused; none where a part has none, and for experts."""

    def edit(tensors: dict[str, Tensor]) -> None:
        for projection, scale in zip("qkv", (0.25, 3.25, 0.5)):
            tensors[f"model.layers.1.self_attn.{projection}_proj.input_scale"] = torch.tensor(scale)
        tensors["model.layers.1.self_attn.o_proj.input_scale"] = torch.tensor([0.125])
        del tensors["model.layers.0.mlp.up_proj.input_scale"]

    packed, _ = folders(KEPT["kimi fp8"], tmp_path, edit)
    config, _ = kept(packed, tmp_path / "kept")
    scales = {name.removeprefix("transformer.layers."): p.input_scale for name, p in config.packings.items()}
    assert scales["2.kda.qkv.weight"] == 3.25 and scales["2.kda.out_proj.weight"] == 0.125
    without = {name for name, scale in scales.items() if scale is None}
    assert without == {name for name in scales if ".experts." in name or name == "1.mlp.up.weight"}
    assert CheckpointConfig.read(tmp_path / "kept").packings == config.packings
    blocks, _ = folders(KEPT["qwen3.5 moe fp8 in small blocks"], tmp_path / "blocks")
    config, _ = kept(blocks, tmp_path / "kept")
    assert {packing.input_scale for packing in config.packings.values()} == {None}


def test_scales_of_inputs_of_compressed_tensors_are_divisors(tmp_path: Path) -> None:
    packed, _ = folders(KEPT["qwen3.5 compressed"], tmp_path)
    config, _ = kept(packed, tmp_path / "kept")
    scales = {p.input_scale for p in config.packings.values() if p.quant_algo == "NVFP4"}
    assert scales == {float(1 / torch.tensor(2.7))}


def test_formats_of_weights_alone_have_no_scales_of_inputs(tmp_path: Path) -> None:
    """Even where one was left in the file: inputs would be rounded that the format does not round."""
    packed, _ = folders(KEPT["falcon nvfp4"], tmp_path)
    relabelled(packed, lambda table: [entry.update(quant_algo="W4A16_NVFP4") for entry in table.values()])
    config, _ = kept(packed, tmp_path / "kept")
    assert {(packing.quant_algo, packing.input_scale) for packing in config.packings.values()} == {("NVFP4", None)}


@pytest.mark.parametrize("name", ["falcon nvfp4_awq", "falcon nvfp4_svd"])
def test_formats_that_change_inputs_are_dequantised(name: str, tmp_path: Path) -> None:
    """pre_quant_scale belongs to the columns, the matrix of low rank to no group."""
    packed, _ = folders(KEPT[name], tmp_path)
    config, warnings = kept(packed, tmp_path / "kept")
    parameters = config.decoder.parameters()
    changed = {weight for weight in parameters if re.search(r"\.(up|down)\.weight$", weight)}
    assert changed and config.packings and not changed & config.packings.keys()
    assert f"dequantised all the same: {len(changed)} weight(s), whose format is not kept" in warnings


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_inputs_that_is_none(scale: float, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.input_scale"
    packed, _ = folders(KEPT["kimi fp8"], tmp_path, lambda tensors: tensors.update({name: torch.tensor(scale)}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is {scale}, which is no scale"):
        kept(packed, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_groups_that_ranks_would_tear_apart_are_dequantised(tmp_path: Path) -> None:
    """24 inputs for each of two ranks are one group of 16 and a half."""
    packed, _ = folders(KEPT["nemotron nano"], tmp_path)
    whole, _ = kept(packed, tmp_path / "kept")
    torn, warnings = kept(packed, tmp_path / "kept", tp_size=2)
    lost = whole.packings.keys() - torn.packings.keys()
    parameters = whole.decoder.parameters()
    assert lost
    assert all(parameters[name].axis == 1 and parameters[name].shape[1] // 2 % 16 for name in lost)
    assert f"dequantised all the same: {len(lost)} weight(s), whose groups of columns do not fit tp_size 2" in warnings


def test_two_segments_of_inputs_are_cut_by_themselves() -> None:
    from trtllm_replayssm.builders.keeping import stored_columns

    parameter = Parameter((8, 96), 1, (Segment(64, 2), Segment(32, 2)))
    columns = stored_columns(parameter, 1, 2, 16)
    assert columns is not None
    assert columns.tolist() == [2, 3, 5]
    assert stored_columns(parameter, 1, 2, 32) is None


# ---- what must be refused --------------------------------------------------------------------------------------------


def test_an_unknown_choice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"quantization is 'perhaps'"):
        convert(tmp_path, tmp_path / "out", quantization="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", DAMAGE)
def test_values_are_judged_as_dequantised(damage: str, tmp_path: Path) -> None:
    module = "backbone.layers.1.mixer.experts.3.up_proj"
    change, what = DAMAGE[damage]
    packed, _ = folders(KEPT["nemotron super"], tmp_path, lambda t: change(t[f"{module}.weight_scale_2"]))
    with pytest.raises(UserError, match=rf"{re.escape(module)}\.weight .*{what}"):
        kept(packed, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def without_scales(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[f"{name}_scale"]


def with_fewer_scales(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}_scale"] = tensors[f"{name}_scale"][1:].clone()


def with_plain_values(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (without_scales, r"lacks {}_scale"),
        (with_fewer_scales, r"{}_scale .*\[\d+"),
        (with_plain_values, r"{} is BF16"),
    ],
)
def test_a_rank_file_that_does_not_fit(change: Callable[..., None], what: str, tmp_path: Path) -> None:
    """Refused by build, by TensorRT's way to the file, and by an engine whose config.json says something else."""
    packed, _ = folders(KEPT["falcon nvfp4"], tmp_path)
    config, _ = kept(packed, tmp_path / "kept")
    name, path = sorted(config.packings)[0], tmp_path / "kept/rank0.safetensors"
    tensors = load_file(path)
    change(tensors, name)
    save_file(tensors, path)
    pattern = what.format(re.escape(name))
    with pytest.raises(CheckpointError, match=pattern):
        build_engine(tmp_path / "kept", tmp_path / "engine")
    with pytest.raises(CheckpointError, match=pattern):
        load_rank(tmp_path / "kept", 0)


EDITS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "unknown weight": lambda packings, name: packings.update({"lm_head.bias": packings[name]}),
    "a norm": lambda packings, name: packings.update({"transformer.ln_f.weight": packings[name]}),
    "unknown algorithm": lambda packings, name: packings[name].update(quant_algo="INT3"),
    "group of another format": lambda packings, name: packings[name].update(group_size=32),
    "group of no columns": lambda packings, name: packings[name].update(quant_algo="FP8", group_size=0),
    "text for a number": lambda packings, name: packings[name].update(group_size="16"),
    "unknown key": lambda packings, name: packings[name].update(zero_point=1),
    "no scale": lambda packings, name: packings[name].update(input_scale=-1.0),
    "divisor of another format": lambda packings, name: packings[name].update(
        quant_algo="FP8", group_size=None, divides=True
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_damaged_description(edit: str, tmp_path: Path) -> None:
    packed, _ = folders(KEPT["falcon nvfp4"], tmp_path)
    config, _ = kept(packed, tmp_path / "kept")
    build_engine(tmp_path / "kept", tmp_path / "engine", BuildOptions(max_batch_size=1, max_seq_len=8))
    for path, inside, error in (
        (tmp_path / "kept/config.json", (), CheckpointError),
        (tmp_path / "engine/config.json", ("pretrained_config",), EngineError),
    ):
        data = json.loads(path.read_text())
        described = data
        for key in inside:
            described = described[key]
        EDITS[edit](described["replayssm"]["packings"], sorted(config.packings)[0])
        path.write_text(json.dumps(data))
        with pytest.raises(error, match=r"is damaged"):
            CheckpointConfig.read(path.parent) if error is CheckpointError else Engine.load(path.parent, device="cpu")
