"""``convert``: exact weights for every rank, strict accounting, refused values, outputs that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_family import CONFIG, LAYERS, TinyFamily, checkpoint_tensors, expected_weights, write_folder

from trtllm_replayssm.builders import convert as conversion
from trtllm_replayssm.builders import staging
from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import Progress, convert_family, is_checkpoint
from trtllm_replayssm.builders.families.base import Source
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError
from trtllm_replayssm.replay import ReplayConfig

IN_PROJ = "hf.transformer.layers.0.mamba2.in_proj.weight"
A_LOG = "hf.transformer.layers.0.mamba2.A_log"
EMBEDDING = "hf.transformer.vocab_embedding.weight"
EXPERT = "hf.transformer.layers.3.moe.experts.up.weight.2.gate"


class Untied(TinyFamily):
    pass


class Tied(TinyFamily):
    tied = True


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return checkpoint_tensors(expected_weights(TinyFamily(HfConfig(CONFIG), {})))


def run(
    model_dir: Path,
    output_dir: Path,
    family: type[TinyFamily] = TinyFamily,
    dtype: str = "auto",
    tp_size: int = 1,
    replay: ReplayConfig = ReplayConfig(),  # noqa: B008
    progress: Progress = lambda *_: None,
    warnings: list[str] | None = None,
) -> CheckpointConfig:
    warn = [].append if warnings is None else warnings.append
    staging.check_folders(model_dir, output_dir, is_checkpoint)
    with HfFolder(model_dir, warn) as folder:
        bound = family(HfConfig(folder.config), folder.shapes)
        return convert_family(folder, bound, output_dir, dtype, tp_size, replay, progress, warn)


def refused(tmp_path: Path, tensors: dict, *parts: str, config: dict | None = None, **options: Any) -> UserError:
    """Converts, expects a refusal that contains the parts and leaves nothing behind."""
    model = write_folder(tmp_path / "hf", tensors, CONFIG | (config or {}))
    with pytest.raises(UserError) as caught:
        run(model, tmp_path / "out", **options)
    # Folders of tests are named after them, and would satisfy many a part.
    message = str(caught.value).replace(str(tmp_path), "")
    for part in parts:
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    return caught.value


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_rank_has_its_part_of_every_weight(
    tmp_path: Path, tensors: dict, dtype: str, tp_size: int, shards: int
) -> None:
    config = run(write_folder(tmp_path / "hf", tensors, shards=shards), tmp_path / "out", dtype=dtype, tp_size=tp_size)
    family = TinyFamily(HfConfig(CONFIG), {})
    weights, parameters = expected_weights(family), family.decoder().parameters(tp_size)
    missing = parameters["lm_head.weight"].shape[0] - family.vocab_size
    weights["lm_head.weight"] = torch.nn.functional.pad(weights["lm_head.weight"], (0, 0, 0, missing))
    assert config == CheckpointConfig.read(tmp_path / "out")
    assert config.dtype == dtype
    for rank in range(tp_size):
        written = load_file(tmp_path / "out" / f"rank{rank}.safetensors")
        assert written.keys() == parameters.keys()
        for name, parameter in parameters.items():
            kept = torch.float32 if parameter.float32 else getattr(torch, dtype)
            assert torch.equal(written[name], parameter.shard(weights[name], rank, tp_size).to(kept)), name


def test_padding_rows_of_the_head_are_zero(tmp_path: Path, tensors: dict) -> None:
    run(write_folder(tmp_path / "hf", tensors), tmp_path / "out", tp_size=2)
    heads = [load_rank(tmp_path / "out", rank)["lm_head.weight"] for rank in range(2)]
    assert [head.shape[0] for head in heads] == [26, 26]
    assert not heads[1][-1].any()
    assert torch.equal(torch.cat(heads)[:51], tensors["hf.lm_head.weight"])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_tied_head_is_written_only_where_ranks_need_their_rows(tmp_path: Path, tensors: dict, tp_size: int) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "hf.lm_head.weight"}
    run(write_folder(tmp_path / "hf", tied), tmp_path / "out", Tied, tp_size=tp_size)
    ranks = [load_rank(tmp_path / "out", rank) for rank in range(tp_size)]
    if tp_size == 1:
        assert "lm_head.weight" not in ranks[0]
    else:
        assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks])[:51], tied[EMBEDDING])


def test_options_and_text_facts_travel(tmp_path: Path, tensors: dict) -> None:
    config = {"max_position_embeddings": 4096, "eos_token_id": 7, "torch_dtype": "bfloat16", "dtype": None}
    model = write_folder(tmp_path / "hf", tensors, CONFIG | config)
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 5, 3]}')
    vocabulary = {"model": {"vocab": {"a": 0, "b": 40}}, "added_tokens": [{"id": 44, "content": "</s>"}]}
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "README.md").write_text("not needed")
    replay = ReplayConfig(window=8, max_draft_len=3, state_dtype="bfloat16", fold="derived")
    run(model, tmp_path / "out", replay=replay)
    read = CheckpointConfig.read(tmp_path / "out")
    assert read.replay == replay
    assert (read.eos_token_ids, read.num_tokens, read.max_position_embeddings) == ((3, 5), 45, 4096)
    assert (read.dtype, read.hf_architecture) == ("bfloat16", "TinyForCausalLM")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "rank0.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_auto_dtype(tmp_path: Path, tensors: dict, config: dict, expected: str) -> None:
    assert run(write_folder(tmp_path / "hf", tensors, CONFIG | config), tmp_path / "out").dtype == expected


@pytest.mark.parametrize(
    ("config", "state_dtype", "named"),
    [
        ({}, "bfloat16", None),
        ({"mamba_ssm_cache_dtype": "float32"}, "float32", None),
        ({"mamba_ssm_cache_dtype": "float32"}, "bfloat16", "float32"),
        ({"mamba_ssm_cache_dtype": "float32"}, "int8", "float32"),
        ({"text_config": {"mamba_ssm_dtype": "torch.bfloat16"}}, "float32", "bfloat16"),
        ({"mamba_ssm_dtype": "float16"}, "float16", None),
        ({"mamba_ssm_dtype": "auto"}, "float32", None),
        ({"mamba_ssm_dtype": None}, "float16", None),
    ],
)
def test_another_dtype_of_states_than_config_json_names_is_said(
    tmp_path: Path, tensors: dict, config: dict, state_dtype: str, named: str | None
) -> None:
    """The option decides; the default is float32, which published models name."""
    warnings: list[str] = []
    model = write_folder(tmp_path / "hf", tensors, CONFIG | config)
    made = run(model, tmp_path / "out", replay=ReplayConfig(state_dtype=state_dtype), warnings=warnings)
    assert made.replay.state_dtype == state_dtype
    said = [warning for warning in warnings if "--state_dtype" in warning]
    assert len(said) == (named is not None)
    if named is not None:
        assert f"dtype is {named}, and the recurrent states will be {state_dtype}; --state_dtype {named}" in said[0]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 4]}, None, (2, 4)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 9}}, None, (9,)),
        ({"eos_token_id": 2}, {"eos_token_id": 6}, (6,)),
        ({"eos_token_id": 2}, {"temperature": 1.0}, (2,)),
        ({"eos_token_id": [2, 5000]}, None, (2,)),
    ],
)
def test_end_tokens(tmp_path: Path, tensors: dict, config: dict, generation: dict | None, expected: tuple) -> None:
    model = write_folder(tmp_path / "hf", tensors, CONFIG | config)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    warnings: list[str] = []
    assert run(model, tmp_path / "out", warnings=warnings).eos_token_ids == expected
    assert any("5000" in warning for warning in warnings) == ("5000" in str(config))


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 50}}}, None),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}, 2),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 9}]}, 10),
        ({}, None),
    ],
)
def test_number_of_tokens(tmp_path: Path, tensors: dict, tokenizer: dict, expected: int | None) -> None:
    model = write_folder(tmp_path / "hf", tensors)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run(model, tmp_path / "out").num_tokens == expected


def test_a_tokenizer_beyond_the_embedding_is_a_warning(tmp_path: Path, tensors: dict) -> None:
    model = write_folder(tmp_path / "hf", tensors)
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 51}}}')
    warnings: list[str] = []
    assert run(model, tmp_path / "out", warnings=warnings).num_tokens is None
    assert "51 rows" in warnings[0]


def test_progress_ends_at_the_total(tmp_path: Path, tensors: dict) -> None:
    calls: list[tuple[int, int, str]] = []
    run(write_folder(tmp_path / "hf", tensors), tmp_path / "out", progress=lambda *call: calls.append(call))
    done, total, _ = zip(*calls)
    assert total[0] == done[-1] == sum(tensor.nbytes for tensor in tensors.values())
    assert list(done) == sorted(set(done)), "every call must move on"


def test_convert_finds_the_family_and_passes_its_notes_on(
    tmp_path: Path, tensors: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_family(config: dict, shapes: dict) -> TinyFamily:
        assert shapes["hf.transformer.ln_f.weight"] == (32,)
        family = TinyFamily(HfConfig(config), shapes)
        family.notes.append("a note")
        return family

    monkeypatch.setattr(conversion, "find_family", find_family)
    warnings: list[str] = []
    model = write_folder(tmp_path / "hf", tensors)
    config = conversion.convert(str(model), str(tmp_path / "out"), warn=warnings.append)
    assert warnings == ["a note"]
    assert config == CheckpointConfig.read(tmp_path / "out")
    assert config.replay == ReplayConfig()


@pytest.mark.parametrize("named", [["TinyForCausalLM"], "TinyForCausalLM", None, []])
def test_architecture_of_the_source(tmp_path: Path, tensors: dict, named: object) -> None:
    model = write_folder(tmp_path / "hf", tensors, CONFIG | {"architectures": named})
    assert run(model, tmp_path / "out").hf_architecture == "TinyForCausalLM"


def test_convert_refuses_unknown_families(tmp_path: Path, tensors: dict) -> None:
    model = write_folder(tmp_path / "hf", tensors)
    with pytest.raises(UnsupportedModelError, match="TinyForCausalLM"):
        conversion.convert(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- accounting ------------------------------------------------------------------------------------------------------


def test_missing_tensors_are_counted_and_named(tmp_path: Path, tensors: dict) -> None:
    rest = {name: tensor for name, tensor in tensors.items() if name not in (A_LOG, EXPERT)}
    refused(tmp_path, rest, "lacks 2 tensors", A_LOG, EXPERT)


def test_unused_tensors_are_counted_and_named(tmp_path: Path, tensors: dict) -> None:
    extra = {f"model.extra.{i}": torch.ones(1) for i in range(5)}
    refused(tmp_path, tensors | extra, "holds 5 tensors", "model.extra.0", "and 2 more")


def test_tensors_dropped_on_purpose_are_listed(tmp_path: Path, tensors: dict) -> None:
    visual = {f"visual.{i}": torch.zeros(2, dtype=torch.int64) for i in range(4)}
    warnings: list[str] = []
    run(write_folder(tmp_path / "hf", tensors | visual), tmp_path / "out", warnings=warnings)
    assert warnings == ["left out 4 tensors (vision tower): visual.0, visual.1, visual.2 and 1 more"]


@pytest.mark.parametrize(
    "name", [IN_PROJ, A_LOG, EMBEDDING, EXPERT, "hf.transformer.layers.1.attention.qkv.weight.k", "hf.lm_head.weight"]
)
def test_wrong_shapes_are_named_before_data_is_read(
    tmp_path: Path, tensors: dict, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfFolder, "tensor", lambda *_: pytest.fail("data was read"))
    shape = list(tensors[name].shape)
    wrong = torch.ones(shape[0] + 1, *shape[1:])
    refused(tmp_path, tensors | {name: wrong}, name, str(list(wrong.shape)), "config.json")


@pytest.mark.parametrize("name", [IN_PROJ, EXPERT])
def test_wrong_rank_is_named(tmp_path: Path, tensors: dict, name: str) -> None:
    refused(tmp_path, tensors | {name: tensors[name][None]}, name)


def test_too_few_experts_are_refused(tmp_path: Path, tensors: dict) -> None:
    class Fewer(TinyFamily):
        def source(self, name: str, shape: tuple[int, ...]) -> Source:
            made = super().source(name, shape)
            return Source(made.names[:-2], made.make, 3) if name.endswith("experts.up.weight") else made

    refused(tmp_path, tensors, "made of 3 parts, but config.json asks for 4", family=Fewer)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_quantised_tensors_are_named_before_data_is_read(
    tmp_path: Path, tensors: dict, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfFolder, "tensor", lambda *_: pytest.fail("data was read"))
    error = refused(tmp_path, tensors | {IN_PROJ: torch.ones(tensors[IN_PROJ].shape).to(dtype)}, IN_PROJ, "quantised")
    assert "BF16" in error.hint


def test_an_equal_copy_of_a_tied_head_is_left_out(tmp_path: Path, tensors: dict) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "hf.lm_head.weight"}
    warnings: list[str] = []
    model = write_folder(tmp_path / "hf", tied | {"lm_head.weight": tied[EMBEDDING].clone()})
    run(model, tmp_path / "out", Tied, warnings=warnings)
    assert "tied" in warnings[0]


@pytest.mark.parametrize(
    "change", [lambda head: head + 1, lambda head: head[:-1].clone(), lambda head: head.to(torch.int8)]
)
def test_a_head_that_contradicts_tying_is_refused(tmp_path: Path, tensors: dict, change: Any) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "hf.lm_head.weight"}
    refused(tmp_path, tied | {"lm_head.weight": change(tied[EMBEDDING])}, "lm_head.weight", family=Tied)


def test_leftovers_of_a_quantised_tied_head_are_refused(tmp_path: Path, tensors: dict) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "hf.lm_head.weight"}
    refused(tmp_path, tied | {"lm_head.weight_scale": torch.ones(1)}, "lm_head.weight_scale", family=Tied)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [IN_PROJ, EXPERT, EMBEDDING, "hf.transformer.layers.0.mamba2.conv1d.bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (float("-inf"), "infinite")]
)
def test_values_that_are_not_finite(
    tmp_path: Path, tensors: dict, name: str, dtype: torch.dtype, value: float, what: str
) -> None:
    broken = tensors[name].clone().to(dtype)
    broken.view(-1)[-1] = value
    refused(tmp_path, tensors | {name: broken}, name, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, 1, 7, 31, 32, 4095, 50_000, 99_998, 99_999])
def test_one_nan_anywhere_is_found(place: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(100_000).to(dtype)
    conversion.check_values("x", tensor, Parameter((100_000,)), dtype)
    tensor[place] = torch.nan
    with pytest.raises(CheckpointError, match="x holds NaN"):
        conversion.check_values("x", tensor, Parameter((100_000,)), dtype)


@pytest.mark.parametrize("name", [IN_PROJ, EXPERT, EMBEDDING, "hf.transformer.ln_f.weight"])
def test_all_zero_weights(tmp_path: Path, tensors: dict, name: str) -> None:
    refused(tmp_path, tensors | {name: torch.zeros_like(tensors[name])}, name, "all zeros")


def test_biases_may_be_zero(tmp_path: Path, tensors: dict) -> None:
    zeros = {name: torch.zeros_like(t) for name, t in tensors.items() if name.endswith(("bias", "A_log", ".D"))}
    assert len(zeros) == 5
    run(write_folder(tmp_path / "hf", tensors | zeros), tmp_path / "out")


@pytest.mark.parametrize(("value", "what"), [(89.0, "exponential"), (float("-inf"), "infinite")])
def test_a_log_must_give_a_finite_decay(tmp_path: Path, tensors: dict, value: float, what: str) -> None:
    broken = tensors[A_LOG].clone()
    broken[1] = value
    refused(tmp_path, tensors | {A_LOG: broken}, A_LOG, what)


@pytest.mark.parametrize("value", [7e4, -7e4])
def test_values_too_large_for_float16(tmp_path: Path, tensors: dict, value: float) -> None:
    large = tensors[IN_PROJ].clone()
    large[3, 3] = value
    error = refused(tmp_path, tensors | {IN_PROJ: large}, IN_PROJ, "float16 cannot represent", dtype="float16")
    assert "bfloat16" in error.hint
    assert run(tmp_path / "hf", tmp_path / "out", dtype="bfloat16").dtype == "bfloat16"


def test_float32_parameters_may_exceed_float16(tmp_path: Path, tensors: dict) -> None:
    name = "hf.transformer.layers.0.mamba2.D"
    large = torch.full_like(tensors[name], 1e5)
    run(write_folder(tmp_path / "hf", tensors | {name: large}), tmp_path / "out", dtype="float16")
    assert load_rank(tmp_path / "out", 0)["transformer.layers.0.mamba2.D"].tolist() == [1e5] * 4


# ---- options and facts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "tp_size", "what"),
    [
        (LAYERS[0], 4, "Mamba-2 groups"),
        (LAYERS[1], 8, "attention heads"),
        (LAYERS[2], 5, "MLP channels"),
        (LAYERS[3], 5, "channels of an expert"),
    ],
)
def test_tp_sizes_that_tear_parts_apart_are_refused_before_accounting(
    tmp_path: Path, layer: Any, tp_size: int, what: str
) -> None:
    class One(TinyFamily):
        layers = (layer,)

    error = refused(tmp_path, {"x": torch.ones(1)}, what, f"tp_size {tp_size}", family=One, tp_size=tp_size)
    assert "choose a tp_size" in error.hint


@pytest.mark.parametrize("tp_size", [0, -1])
def test_tp_size_must_be_positive(tmp_path: Path, tensors: dict, tp_size: int) -> None:
    refused(tmp_path, tensors, "tp_size", tp_size=tp_size)


@pytest.mark.parametrize("dtype", ["float64", "fp16", "int8", ""])
def test_unknown_dtypes(tmp_path: Path, tensors: dict, dtype: str) -> None:
    refused(tmp_path, tensors, "dtype", dtype=dtype)


@pytest.mark.parametrize("named", ["float64", 16, "float8_e4m3fn"])
def test_unknown_dtypes_in_the_config(tmp_path: Path, tensors: dict, named: object) -> None:
    assert "--dtype" in refused(tmp_path, tensors, "dtype", config={"dtype": named}).hint


@pytest.mark.parametrize("value", ["</s>", True, 2.0, ["2"], [None]])
def test_end_tokens_of_another_type(tmp_path: Path, tensors: dict, value: object) -> None:
    refused(tmp_path, tensors, "config.json: eos_token_id", config={"eos_token_id": value})


@pytest.mark.parametrize("value", ["4096", True, 0.5, -1])
def test_trained_length_of_another_type(tmp_path: Path, tensors: dict, value: object) -> None:
    refused(tmp_path, tensors, "trained length", config={"max_position_embeddings": value})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"model": []}', "damaged"),
        ('{"model": {"vocab": {"a": "b"}}}', "damaged"),
        ('{"added_tokens": [{}]}', "damaged"),
    ],
)
def test_damaged_tokenizers(tmp_path: Path, tensors: dict, text: str, what: str) -> None:
    model = write_folder(tmp_path / "hf", tensors)
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"tokenizer.json.*{what}"):
        run(model, tmp_path / "out")


# ---- output folder ---------------------------------------------------------------------------------------------------


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def converted(tmp_path: Path, tensors: dict) -> Path:
    """hf and an earlier checkpoint, out, of two ranks."""
    run(write_folder(tmp_path / "hf", tensors), tmp_path / "out", tp_size=2)
    return tmp_path


def test_an_earlier_checkpoint_is_replaced(converted: Path) -> None:
    run(converted / "hf", converted / "out", dtype="bfloat16")
    assert {path.name for path in (converted / "out").iterdir()} == {"config.json", "rank0.safetensors"}
    assert sorted(path.name for path in converted.iterdir()) == ["hf", "out"]


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path, tensors: dict) -> None:
    model = write_folder(tmp_path / "hf", tensors)
    (tmp_path / "empty").mkdir()
    run(model, tmp_path / "empty")
    run(model, tmp_path / "a" / "b" / "out")
    assert fingerprint(tmp_path / "empty") == fingerprint(tmp_path / "a" / "b" / "out")


def test_a_mount_point_is_filled_in_place(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = converted / "out"
    node = out.stat().st_ino
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    run(converted / "hf", out, dtype="bfloat16")
    assert {path.name for path in out.iterdir()} == {"config.json", "rank0.safetensors"}
    assert out.stat().st_ino == node
    assert load_rank(out, 0)["transformer.ln_f.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["notes.txt", "rank0.engine", "model.safetensors"])
def test_a_folder_with_other_files_is_not_touched(converted: Path, name: str) -> None:
    (converted / "out" / name).write_text("mine")
    before = fingerprint(converted / "out")
    with pytest.raises(UserError, match="not empty"):
        run(converted / "hf", converted / "out")
    assert fingerprint(converted / "out") == before


@pytest.mark.parametrize("text", ['{"architecture": "LlamaForCausalLM"}', "[]", "{"])
def test_a_checkpoint_of_another_program_is_not_touched(converted: Path, text: str) -> None:
    (converted / "out" / "config.json").write_text(text)
    with pytest.raises(UserError, match="not empty"):
        run(converted / "hf", converted / "out")


def test_a_file_as_output(converted: Path) -> None:
    (converted / "file").write_text("mine")
    with pytest.raises(UserError, match="not a folder"):
        run(converted / "hf", converted / "file")


@pytest.mark.parametrize("output", ["hf", "hf/out", ".", "link", "link/out"])
def test_source_and_output_must_not_contain_each_other(converted: Path, output: str) -> None:
    (converted / "link").symlink_to(converted / "hf")
    with pytest.raises(UserError, match="inside one another"):
        run(converted / "hf", converted / output)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        MemoryError(),
    ],
)
def test_a_failure_leaves_the_earlier_checkpoint(converted: Path, error: BaseException) -> None:
    before = fingerprint(converted / "out")

    def fail_late(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise error

    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        run(converted / "hf", converted / "out", progress=fail_late)
    assert fingerprint(converted / "out") == before
    assert sorted(path.name for path in converted.iterdir()) == ["hf", "out"]
    if isinstance(error, OSError):
        assert str(caught.value).endswith(f"cannot be written: {error.strerror}")
        assert "free some space" in caught.value.hint  # type: ignore[attr-defined]


def test_a_failure_at_the_exchange_brings_the_earlier_checkpoint_back(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = fingerprint(converted / "out"), Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(UserError, match="Permission denied"):
        run(converted / "hf", converted / "out")
    assert fingerprint(converted / "out") == before
    assert sorted(path.name for path in converted.iterdir()) == ["hf", "out"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, tensors: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(conversion, "staged_folder", lambda _: pytest.fail("something was written"))
    refused(tmp_path, tensors, "its disk has 1000 B left")


def test_what_killed_runs_left_is_named_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    hint = "free some space, or choose a folder on another disk"
    for folder in (tmp_path / "out", tmp_path / "not" / "there"):
        with pytest.raises(UserError, match="needs 11 B, and its disk has 10 B left") as caught:
            staging.check_space(folder, 11)
        assert caught.value.hint == hint
    left, old = tmp_path / ".out.123.tmp", tmp_path / ".out.45.old"
    for name in (left.name, old.name, ".out.tmp", ".outer.123.tmp", "out.123.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError) as caught:
        staging.check_space(tmp_path / "out", 11)
    assert caught.value.hint == f"{hint}; a run that was killed may have left {left}, {old}"


def test_an_output_that_cannot_be_created(converted: Path) -> None:
    (converted / "file").write_text("")
    for output in ("out", "deeper/out"):
        with pytest.raises(UserError, match=r"cannot be written: .*file is not a folder$") as refused:
            run(converted / "hf", converted / "file" / output)
        assert refused.value.hint == "choose another --output_dir"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", '{"bos_token": "<s>", ', "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", '{"chat_template": "{% for m in messages %}"}', "the chat template in .* is broken"),
        ("chat_template.jinja", "{{ messages | shout }}", "the chat template in .* is broken"),
    ],
)
def test_a_damaged_chat_template_is_found_before_the_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, says: str
) -> None:
    folder = shutil.copytree(Path(__file__).parent / "data" / "trained" / "mamba2", tmp_path / "model")
    words = ["convert", "--model_dir", str(folder), "--output_dir", str(tmp_path / "out")]
    (folder / name).write_text(content)
    assert main(words) == 1
    assert re.match(f"error: .*{says}.*\nhint: download it again, or remove it", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    (folder / name).write_text("{}")
    assert main(words) == 0


# ---- memory ----------------------------------------------------------------------------------------------------------

# VmHWM, not ru_maxrss, which a child takes over from the process that starts it.
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


class Large(TinyFamily):
    """About 340 MB in float32, the largest tensor 21 MB; fused experts alone are 189 and 94 MB."""

    vocab_size = 10_000

    def decoder(self) -> Any:
        wide = (replace(LAYERS[2], intermediate_size=3000), replace(LAYERS[3], num_experts=60, intermediate_size=768))
        return replace(super().decoder(), hidden_size=512, layers=(*LAYERS, *wide))


def test_peak_memory_is_about_the_largest_tensor(tmp_path: Path, tensors: dict) -> None:
    large = checkpoint_tensors(expected_weights(Large(HfConfig(CONFIG), {})))
    total, largest = sum(t.nbytes for t in large.values()), max(t.nbytes for t in large.values())
    assert total > 330e6
    assert largest < 22e6
    write_folder(tmp_path / "small", tensors)
    write_folder(tmp_path / "large", large, shards=3)
    del large
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert largest / 4 < int(done.stdout) < 3 * largest, f"peak memory grew by {int(done.stdout) / 1e6:.0f} MB"
