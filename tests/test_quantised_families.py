"""Tiny models of every family, quantised as published checkpoints are: converted, they equal their dequantised twins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import quantisers as q
import torch
from hf_models import build, random_ids, reference_logits
from hf_spelling import read_folder, write_folder, write_hub
from quantised_recipes import ALGORITHMS, RECIPES, folders, relabelled
from quantisers import Quantiser
from test_parity import absorb

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.session import Session

every_recipe = pytest.mark.parametrize("name", RECIPES)


def run(folder: Path, **options: Any) -> tuple[dict[str, bytes], list[str]]:
    """Files of the checkpoint, and the warnings."""
    warnings: list[str] = []
    target = folder.with_name(f"{folder.name}.checkpoint")
    convert(folder, target, warn=warnings.append, **options)
    return {path.name: path.read_bytes() for path in sorted(target.iterdir())}, warnings


@every_recipe
def test_converted_as_the_dequantised_twin(name: str, tmp_path: Path) -> None:
    """Every byte of config and weights, in the activations' dtype, which the description leaves to config.json."""
    recipe = RECIPES[name]
    packed, plain = folders(recipe, tmp_path)
    files, warnings = run(packed)
    expected, _ = run(plain)
    assert files.keys() == expected.keys()
    for file, content in expected.items():
        assert files[file] == content, file
    assert json.loads(files["config.json"])["dtype"] == "bfloat16"
    note = next(message for message in warnings if "dequantised" in message)
    assert note.endswith(recipe.counts)
    assert any("KV cache" in message and str(len(recipe.extra)) in message for message in warnings) == bool(
        recipe.extra
    )


@pytest.mark.parametrize("name", ["nemotron nano", "qwen3-next fp8", "ling fp8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ranks_and_other_dtypes(name: str, dtype: str, tmp_path: Path) -> None:
    packed, plain = folders(RECIPES[name], tmp_path)
    files, _ = run(packed, dtype=dtype, tp_size=2)
    expected, _ = run(plain, dtype=dtype, tp_size=2)
    assert files == expected


@pytest.mark.parametrize("name", ["qwen3.5 compressed", "nemotron nano 4b"])
def test_logits_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    """The engine of the quantised checkpoint against transformers with the dequantised weights."""
    packed, plain = folders(RECIPES[name], tmp_path)
    model = build(RECIPES[name].model)
    inside = {n.replace("backbone.", "model."): t for n, t in read_folder(plain)[1].items() if "mtp" not in n}
    assert model.state_dict().keys() == inside.keys()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.load_state_dict(inside)
    assert sum(not torch.equal(before[n], t) for n, t in inside.items()) > 10
    check_logits(model, packed, tmp_path)


def test_logits_of_kimi_k3_with_dequantised_experts(tmp_path: Path) -> None:
    packed, plain = folders(RECIPES["kimi-k3 mxfp4"], tmp_path)
    model, dequantised = build("kimi_k3"), read_folder(plain)[1]
    changed = {n for n, t in model.tensors.items() if not torch.equal(t, dequantised[n])}
    assert changed == {n for n in model.tensors if ".experts." in n}
    model.tensors |= {n: dequantised[n] for n in model.tensors}
    check_logits(model, packed, tmp_path)


def check_logits(model: Any, packed: Path, tmp_path: Path) -> None:
    """The engine of a quantised checkpoint against a model with the dequantised weights."""
    convert(packed, tmp_path / "checkpoint", dtype="float32", warn=lambda message: None)
    build_engine(
        tmp_path / "checkpoint", tmp_path / "engine", BuildOptions(max_batch_size=2, max_seq_len=16, max_num_tokens=64)
    )
    ids = random_ids(2, 12)
    logits = absorb(Session(Engine.load(tmp_path / "engine", device="cpu")), ids)
    expected = reference_logits(model, ids)
    assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.std()))


# ---- what must be refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", [q.nvfp4, q.fp8])
def test_a_quantised_head_beside_a_tied_flag(quantiser: Quantiser, tmp_path: Path) -> None:
    """Even where it stands for the embedding: which of the two was trained is not ours to guess."""
    config, tensors = read_folder(write_hub(build("qwen3_5_text_tied_v3"), tmp_path / "full"))
    head = quantiser(tensors["model.embed_tokens.weight"])
    stored = tensors | {f"lm_head.{part}": tensor for part, tensor in head.tensors.items()}
    algorithm = ALGORITHMS[quantiser.__name__]
    description = {"quant_method": "modelopt", "quant_algo": algorithm}
    packed = write_folder(tmp_path / "packed", config | {"quantization_config": description}, stored, 1)
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding, but lm_head\.weight"):
        run(packed)


DAMAGE = {
    "NaN": (lambda t: t.fill_(float("nan")), "NaN"),
    # Times the values that are zero.
    "infinity": (lambda t: t.fill_(float("inf")), "NaN"),
    "all zero": (lambda t: t.zero_(), "all zeros"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_values_are_judged_as_dequantised(damage: str, tmp_path: Path) -> None:
    """A scale that is not finite, or zero, shows in the weight, and nothing is written."""
    module = "backbone.layers.1.mixer.experts.3.up_proj"
    change, what = DAMAGE[damage]
    packed, _ = folders(
        RECIPES["nemotron super"], tmp_path, lambda tensors: change(tensors[f"{module}.weight_scale_2"])
    )
    with pytest.raises(UserError, match=rf"{re.escape(module)}\.weight .*{what}"):
        run(packed)
    assert not (tmp_path / "packed.checkpoint").exists()


def test_a_value_that_float16_cannot_hold(tmp_path: Path) -> None:
    module = "backbone.layers.1.mixer.experts.3.up_proj"
    packed, _ = folders(RECIPES["nemotron super"], tmp_path, lambda t: t[f"{module}.weight_scale_2"].fill_(1e3))
    with pytest.raises(UserError, match=rf"{re.escape(module)}.*float16"):
        run(packed, dtype="float16")
    run(packed, dtype="bfloat16")


def test_a_format_that_is_not_read_matters_where_the_model_uses_it(tmp_path: Path) -> None:
    """The MTP layer of this family is left out, the experts of its layers are not."""
    packed, plain = folders(RECIPES["qwen3.8-flash-next nvfp4"], tmp_path)
    relabelled(packed, lambda table: table["mtp.layers.0.mlp.experts"].update(quant_algo="W4A8_NEW"))
    assert run(packed)[0] == run(plain)[0]
    module = "model.language_model.layers.1.mlp.experts"
    relabelled(packed, lambda table: table[module].update(quant_algo="W4A8_NEW"))
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(module)}: quant_algo W4A8_NEW is not read"):
        run(packed)


def test_a_plain_weight_that_a_table_calls_quantised_matters_where_the_model_uses_it(tmp_path: Path) -> None:
    """A bank of experts in bfloat16 under an entry of NVFP4; the plain MTP layer that a table calls quantised is left out."""
    packed, plain = folders(RECIPES["qwen3.8-flash-next nvfp4"], tmp_path)
    config, tensors = read_folder(packed)
    whole = read_folder(plain)[1]

    def with_plain(part: str) -> Path:
        names = [name for name in whole if part in name]
        left = {n: t for n, t in tensors.items() if part not in n}
        return write_folder(tmp_path / part, config, left | {n: whole[n].to(torch.bfloat16) for n in names}, 1)

    expected = run(plain)[0]
    assert run(with_plain("mtp.layers.0.mlp.experts"))[0] == expected
    experts = "language_model.layers.1.mlp.experts"
    with pytest.raises(CheckpointError, match=rf"says that model\.{re.escape(experts)}\.\w+ is NVFP4, but .* is BF16"):
        run(with_plain(experts))


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float8_e4m3fn"])
def test_the_dtype_in_which_engines_keep_a_table(dtype: str | None, tmp_path: Path) -> None:
    """It changes nothing: what is stored is told by the tensors."""
    packed, plain = folders(RECIPES["qwen3.8-flash-next fp8"], tmp_path)
    config = json.loads((packed / "config.json").read_text())
    config["text_config"]["ple_embedding_dtype"] = dtype
    (packed / "config.json").write_text(json.dumps(config))
    assert run(packed)[0] == run(plain)[0]


def test_a_dtype_of_tables_that_is_not_read(tmp_path: Path) -> None:
    config, tensors = read_folder(write_hub(build("qwen4_exp_vl"), tmp_path / "full"))
    config["text_config"]["ple_embedding_dtype"] = "nvfp4"
    with pytest.raises(UnsupportedModelError, match=r'ple_embedding_dtype is "nvfp4"'):
        run(write_folder(tmp_path / "nvfp4", config, tensors, 1))


def test_scales_of_no_cache_are_not_left_out(tmp_path: Path) -> None:
    wrong = {"backbone.layers.5.mixer.k_proj.k_scale": torch.zeros(7, 5)}
    packed, _ = folders(RECIPES["nemotron super"], tmp_path, lambda tensors: tensors.update(wrong))
    with pytest.raises(CheckpointError, match=r"1 tensors that this model does not use: .*k_scale"):
        run(packed)
