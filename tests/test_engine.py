"""Engine folders: what build writes, and everything that build and load refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trtllm_replayssm.builders.checkpoint import TOKENIZER_FILES
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.errors import CheckpointError, EngineError, UserError
from trtllm_replayssm.plugins import PLUGIN_VERSION
from trtllm_replayssm.runtime import build, devices
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.engine_config import DEFAULT_MAX_SEQ_LEN, ENGINE_FORMAT, EngineConfig
from trtllm_replayssm.runtime.session import Session

SMALL = synthetic.decoder((Mamba2(4, 16, 16, 2, 4, 1e-5), Mlp(96, "relu2")))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return synthetic.write_checkpoint(tmp_path / "checkpoint", SMALL)


@pytest.fixture
def engine_dir(tmp_path: Path, checkpoint: Path) -> Path:
    build_engine(checkpoint, tmp_path / "engine", BuildOptions(max_batch_size=2, max_seq_len=64))
    return tmp_path / "engine"


@pytest.fixture
def two_ranks(tmp_path: Path) -> Path:
    return synthetic.write_engine(tmp_path / "two", SMALL, tp_size=2)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


# ---- what build writes -----------------------------------------------------------------------------------------------


def test_build_writes_the_layout_of_tensorrt_llm(checkpoint: Path, tmp_path: Path) -> None:
    synthetic.write_tokenizer(checkpoint)
    seen: list[tuple[int, int, str]] = []
    options = BuildOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=32, max_draft_len=3, state_dtype="bfloat16")
    build_engine(checkpoint, tmp_path / "engine", options, lambda *report: seen.append(report))
    data = json.loads((tmp_path / "engine/config.json").read_text())
    assert {"version", "pretrained_config", "build_config", "replayssm"} == set(data)
    assert data["build_config"] == {
        "max_batch_size": 2,
        "max_seq_len": 64,
        "max_num_tokens": 32,
        "max_beam_width": 1,
        "max_draft_len": 3,
    }
    assert data["replayssm"]["format_version"] == ENGINE_FORMAT
    assert data["replayssm"]["plugin_version"] == PLUGIN_VERSION
    assert data["pretrained_config"]["replayssm"]["replay"]["state_dtype"] == "bfloat16"
    assert data["pretrained_config"]["replayssm"]["replay"]["window"] == 16  # the checkpoint's own
    assert {path.name for path in (tmp_path / "engine").iterdir()} == {"config.json", "rank0.engine", "tokenizer.json"}
    weights = load_file(checkpoint / "rank0.safetensors")
    total = sum(t.nbytes for t in weights.values())
    assert seen[-1] == (total, total, "rank0.engine")


def test_loaded_weights_are_the_checkpoints_and_stay_on_disk(checkpoint: Path, engine_dir: Path) -> None:
    engine, weights = Engine.load(engine_dir, device="cpu"), load_file(checkpoint / "rank0.safetensors")
    assert engine.weights.keys() == weights.keys()
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in weights.items())
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(engine_dir / "rank0.engine") in maps.read_text()


def test_every_tokenizer_file_travels(checkpoint: Path, tmp_path: Path) -> None:
    for name in TOKENIZER_FILES:
        (checkpoint / name).write_text(name)
    build_engine(checkpoint, tmp_path / "engine")
    assert all((tmp_path / "engine" / name).read_text() == name for name in TOKENIZER_FILES)


def test_fingerprint_names_weights_and_options(tmp_path: Path) -> None:
    def fingerprint(name: str, seed: int, **options: int) -> str:
        source = synthetic.write_checkpoint(tmp_path / f"{name}.checkpoint", SMALL, seed=seed)
        return build_engine(source, tmp_path / name, BuildOptions(max_seq_len=64, **options)).fingerprint

    one = fingerprint("one", 0)
    assert fingerprint("again", 0) == one
    assert fingerprint("weights", 1) != one
    assert fingerprint("options", 0, max_batch_size=3) != one
    with safe_open(tmp_path / "one/rank0.engine", framework="pt") as file:
        assert file.metadata()["fingerprint"] == one


def test_sequence_length_defaults_to_what_the_model_was_trained_for(checkpoint: Path, tmp_path: Path) -> None:
    assert build_engine(checkpoint, tmp_path / "a").max_seq_len == 1000
    edit_config(checkpoint, lambda data: data.update(max_position_embeddings=262144))
    assert build_engine(checkpoint, tmp_path / "b").max_seq_len == DEFAULT_MAX_SEQ_LEN
    edit_config(checkpoint, lambda data: data.update(max_position_embeddings=None))
    assert build_engine(checkpoint, tmp_path / "c").max_seq_len == DEFAULT_MAX_SEQ_LEN


def test_an_earlier_engine_is_replaced(checkpoint: Path, engine_dir: Path) -> None:
    (engine_dir / "rank9.engine").write_text("left over")
    build_engine(checkpoint, engine_dir, BuildOptions(max_batch_size=3, max_seq_len=64))
    assert EngineConfig.read(engine_dir).max_batch_size == 3
    assert not (engine_dir / "rank9.engine").exists()


def test_a_failed_build_leaves_the_earlier_engine(
    checkpoint: Path, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in engine_dir.iterdir()}
    monkeypatch.setattr(build, "stamp", fail)
    with pytest.raises(UserError, match="No space left"):
        build_engine(checkpoint, engine_dir)
    assert {path.name: path.read_bytes() for path in engine_dir.iterdir()} == before
    assert {path.name for path in engine_dir.parent.iterdir()} == {"checkpoint", "engine"}


# ---- what build refuses ----------------------------------------------------------------------------------------------


def rewrite_rank(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "rank0.safetensors")
    change(tensors)
    save_file(tensors, folder / "rank0.safetensors")


UP = "transformer.layers.1.mlp.up.weight"
A_LOG = "transformer.layers.0.mamba2.A_log"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop(UP), rf"lacks {UP}$"),
        (lambda t: (t.pop(UP), t.pop(A_LOG)), rf"lacks {A_LOG} and 1 more$"),
        (lambda t: t.update(extra=torch.ones(1)), "holds an unknown tensor, extra$"),
        (lambda t: t.update({UP: torch.ones(96, 65)}), rf"{UP} has shape \[96, 65\], expected \[96, 64\]"),
        (lambda t: t.update({UP: t[UP].half()}), f"{UP} is F16, expected float32"),
    ],
)
def test_build_refuses_other_tensors_than_the_model_has(
    checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], match: str
) -> None:
    rewrite_rank(checkpoint, change)
    with pytest.raises(CheckpointError, match=match):
        build_engine(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_build_refuses_16_bits_where_32_are_kept(tmp_path: Path) -> None:
    source = synthetic.write_checkpoint(tmp_path / "checkpoint", SMALL, dtype="bfloat16")
    rewrite_rank(source, lambda t: t.update({A_LOG: t[A_LOG].bfloat16()}))
    with pytest.raises(CheckpointError, match=f"{A_LOG} is BF16, expected float32"):
        build_engine(source, tmp_path / "engine")


def test_build_refuses_missing_surplus_and_truncated_rank_files(checkpoint: Path, tmp_path: Path) -> None:
    rank = checkpoint / "rank0.safetensors"
    shutil.copy(rank, checkpoint / "rank1.safetensors")
    with pytest.raises(CheckpointError, match=r"holds rank1.safetensors, but its config.json says tp_size 1"):
        build_engine(checkpoint, tmp_path / "engine")
    (checkpoint / "rank1.safetensors").unlink()
    rank.write_bytes(rank.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        build_engine(checkpoint, tmp_path / "engine")
    rank.unlink()
    with pytest.raises(CheckpointError, match=r"lacks rank0.safetensors"):
        build_engine(checkpoint, tmp_path / "engine")


def test_build_refuses_to_overwrite_what_is_not_an_engine(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "notes"
    target.mkdir()
    (target / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        build_engine(checkpoint, target)
    assert (target / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "rank0.safetensors", "checkpoint/config.json"])
def test_build_does_not_replace_an_engine_with_other_files_beside_it(
    checkpoint: Path, engine_dir: Path, name: str
) -> None:
    (engine_dir / name).parent.mkdir(exist_ok=True)
    (engine_dir / name).write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        build_engine(checkpoint, engine_dir)
    assert (engine_dir / name).read_text() == "mine"
    assert EngineConfig.read(engine_dir).max_batch_size == 2


@pytest.mark.parametrize("output", ["checkpoint", "checkpoint/engine", ".", "link", "link/engine"])
def test_build_refuses_checkpoint_and_output_inside_one_another(checkpoint: Path, tmp_path: Path, output: str) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(UserError, match="inside one another"):
        build_engine(checkpoint, tmp_path / output)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_num_tokens": -1}, "max_num_tokens is -1"),
        ({"max_batch_size": 2.5}, "max_batch_size is 2.5; it must be an integer"),
        ({"max_num_tokens": 7}, "max_num_tokens 7 is too small for a step of 8 requests, which takes 8 tokens"),
        ({"max_num_tokens": 31, "max_draft_len": 3}, "takes 32 tokens"),
        ({"replay_window": 65}, "replay_window is 65"),
        ({"replay_window": 2, "max_draft_len": 3}, "shorter than a verify step"),
        ({"engine_flavour": "tflite"}, "flavour 'tflite' is not known"),
    ],
)
def test_build_refuses_options_that_cannot_work(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        build_engine(checkpoint, tmp_path / "engine", BuildOptions(**options))
    assert not (tmp_path / "engine").exists()


# ---- what load refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["replayssm"].update(format_version=99), r"format_version 99 \(built by version .*needs 1"),
        (lambda d: d["replayssm"].update(plugin_version="0"), "plugin_version 0 .*needs"),
        (lambda d: d["replayssm"].update(engine_flavour="tensorrt"), "is damaged: it has no 'tensorrt'"),
        (lambda d: d.pop("replayssm"), "does not describe an engine of trtllm-replayssm"),
        (lambda d: d.pop("pretrained_config"), "does not describe an engine of trtllm-replayssm"),
        (lambda d: d["build_config"].pop("max_seq_len"), "is damaged: .*max_seq_len"),
        (lambda d: d["pretrained_config"].pop("dtype"), "is damaged: it has no 'dtype'"),
        (lambda d: d.update(build_config=None), "is damaged: it has parts of other types or names"),
        (lambda d: d["replayssm"].update(rank_bytes=None), "is damaged: it has parts of other types or names"),
        # With these, a session would take no tokens at a step, and never end.
        (lambda d: d["build_config"].update(max_batch_size=0), "is damaged: max_batch_size is 0"),
        (lambda d: d["build_config"].update(max_num_tokens=1), "is damaged: max_num_tokens 1 is too small"),
        (lambda d: d["build_config"].update(max_seq_len=64.5), "is damaged: max_seq_len is 64.5"),
        (lambda d: d["build_config"].update(max_seq_len=True), "is damaged: max_seq_len is True"),
    ],
)
def test_load_refuses_configs_of_other_versions_and_programs(
    engine_dir: Path, change: Callable[[dict[str, Any]], object], match: str
) -> None:
    edit_config(engine_dir, change)
    with pytest.raises(EngineError, match=match) as caught:
        Engine.load(engine_dir)
    assert caught.value.hint


@pytest.mark.parametrize("sizes", [[], [1, 2], ["abc"], [-1]])
def test_load_refuses_sizes_that_no_rank_files_have(engine_dir: Path, sizes: list[Any]) -> None:
    edit_config(engine_dir, lambda d: rank_bytes_owner(d).update(rank_bytes=sizes))
    with pytest.raises(EngineError, match=r"is damaged: .*rank_bytes"):
        Engine.load(engine_dir, device="cpu")


def rank_bytes_owner(data: dict[str, Any]) -> dict[str, Any]:
    return next(part for part in data.values() if isinstance(part, dict) and "rank_bytes" in part)


def test_load_refuses_a_config_nested_without_end(engine_dir: Path) -> None:
    (engine_dir / "config.json").write_text("[" * 100_000)
    with pytest.raises(EngineError, match="cannot be read as JSON"):
        Engine.load(engine_dir, device="cpu")


def test_load_refuses_folders_without_a_readable_config(tmp_path: Path, engine_dir: Path) -> None:
    with pytest.raises(EngineError, match="does not exist"):
        Engine.load(tmp_path / "nothing")
    with pytest.raises(EngineError, match="does not exist"):
        Engine.load(engine_dir / "config.json")
    for text, match in (("{", "cannot be read as JSON"), ("[]", "does not hold a JSON object")):
        (engine_dir / "config.json").write_text(text)
        with pytest.raises(EngineError, match=match):
            Engine.load(engine_dir)
    (engine_dir / "config.json").unlink()
    (engine_dir / "config.json").mkdir()
    with pytest.raises(EngineError, match=r"config\.json cannot be read: Is a directory$") as caught:
        Engine.load(engine_dir)
    assert not caught.value.hint


def test_load_refuses_a_missing_rank(two_ranks: Path) -> None:
    (two_ranks / "rank1.engine").unlink()
    with pytest.raises(EngineError, match=r"rank1.engine is missing; the engine has 2 rank files"):
        load_rank(two_ranks, 0)


def test_load_refuses_a_truncated_file(engine_dir: Path) -> None:
    file = engine_dir / "rank0.engine"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(EngineError, match=f"has {size - 1} bytes, but was built with {size}"):
        Engine.load(engine_dir)


def test_load_refuses_rank_files_of_two_builds(two_ranks: Path, tmp_path: Path) -> None:
    other = synthetic.write_engine(tmp_path / "other", SMALL, tp_size=2, seed=1)
    shutil.copy(other / "rank1.engine", two_ranks / "rank1.engine")
    load_rank(two_ranks, 0)
    with pytest.raises(EngineError, match="belongs to another build: its fingerprint"):
        load_rank(two_ranks, 1)


def test_load_refuses_swapped_ranks(two_ranks: Path) -> None:
    shutil.copy(two_ranks / "rank0.engine", two_ranks / "rank1.engine")
    with pytest.raises(EngineError, match="belongs to another build: its rank"):
        load_rank(two_ranks, 1)


def load_rank(folder: Path, rank: int) -> None:
    """The checks that Engine.load makes of a rank's file, without the group of processes that a whole load needs."""
    from trtllm_replayssm.runtime.engine import checked_file

    checked_file(folder, EngineConfig.read(folder), rank)


def test_load_refuses_a_lone_process_for_several_ranks(two_ranks: Path) -> None:
    with pytest.raises(EngineError, match="built for 2 ranks, but 1 are running") as caught:
        Engine.load(two_ranks)
    assert "torchrun --nproc_per_node 2" in caught.value.hint


def test_load_refuses_ranks_that_the_engine_does_not_have(engine_dir: Path) -> None:
    with pytest.raises(EngineError, match="has no rank 1"):
        Engine.load(engine_dir, rank=1)


def test_load_refuses_devices_and_implementations_that_are_not_there(engine_dir: Path) -> None:
    for device, match in (("tpu9", "not known"), ("cuda:99", "is not there"), ("meta", "is not supported")):
        with pytest.raises(EngineError, match=match):
            Engine.load(engine_dir, device=device)
    with pytest.raises(EngineError, match="cuda is not available on cpu"):
        Engine.load(engine_dir, device="cpu", plugin_impl="cuda")
    with pytest.raises(EngineError, match="'fast' is not known"):
        Engine.load(engine_dir, plugin_impl="fast")  # type: ignore[arg-type]


def test_too_little_memory_is_said_with_figures_and_the_knob_to_turn(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.read(engine_dir)
    engine = Engine.load(engine_dir, device="cpu")
    weights, slot = sum(t.nbytes for t in engine.weights.values()), config.slot_bytes()
    monkeypatch.setattr(devices, "available_bytes", lambda device: weights + slot)
    with pytest.raises(EngineError, match=r"needs .* of weights and .* of state, but cpu has .* free") as caught:
        Engine.load(engine_dir, device="cpu")
    assert "--max_batch_size 1" in caught.value.hint
    monkeypatch.setattr(devices, "available_bytes", lambda device: weights)
    with pytest.raises(EngineError, match="needs") as caught:
        Engine.load(engine_dir, device="cpu")
    assert caught.value.hint.startswith("build with a smaller --max_seq_len, or use a larger machine")
    monkeypatch.setattr(devices, "available_bytes", lambda device: weights - 1)
    with pytest.raises(EngineError, match="needs") as caught:
        Engine.load(engine_dir, device="cpu")
    assert caught.value.hint == "use a larger machine, or more ranks: convert with a larger --tp_size"
    monkeypatch.setattr(devices, "available_bytes", lambda device: weights + 2 * slot)
    Session(Engine.load(engine_dir, device="cpu"))
    monkeypatch.setattr(devices, "available_bytes", lambda device: 2 * slot)
    with pytest.raises(EngineError, match="of state, but cpu has"):
        Session(engine, snapshot_slots=1)


def test_free_memory_is_read_from_this_machine() -> None:
    free = devices.available_bytes(torch.device("cpu"))
    assert free is not None
    assert 1e6 < free < 1e15
