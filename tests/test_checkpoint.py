"""The TensorRT-LLM checkpoint: what is written is read back; damage is named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_family import CONFIG, TinyFamily, checkpoint_tensors, expected_weights, write_folder

from trtllm_replayssm.builders.checkpoint import ARCHITECTURE, CheckpointConfig, load_rank
from trtllm_replayssm.builders.convert import convert_family
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.builders.safetensors_writer import SafetensorsWriter
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.replay import ReplayConfig

# ---- the writer ------------------------------------------------------------------------------------------------------

MIXED = {
    "half": torch.randn(3, 5).to(torch.bfloat16),
    'name with "quotes" and ü': torch.randn(7),
    "scalar": torch.tensor(1.5, dtype=torch.float16),
    "cube": torch.randn(2, 3, 4),
}


def layout_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_written_files_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, layout_of(MIXED)) as writer:
        for name in reversed(MIXED):
            writer.append(name, MIXED[name])
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(MIXED)
        assert file.metadata() == {"format": "pt"}
        for name, tensor in MIXED.items():
            assert torch.equal(file.get_tensor(name), tensor)
    entries = SafetensorsFile(path).entries
    sizes = {"F32": 4, "F16": 2, "BF16": 2}
    assert all(entry.start % sizes[entry.dtype] == 0 for entry in entries.values()), "tensors must be aligned"
    assert min(entry.start for entry in entries.values()) % 8 == 0


def test_pieces_are_converted_and_may_alternate(tmp_path: Path) -> None:
    path, wide = tmp_path / "x.safetensors", torch.randn(4, 6)
    with SafetensorsWriter(path, {"a": (torch.bfloat16, (4, 6)), "b": (torch.float32, (6, 4))}) as writer:
        for rows in range(4):
            writer.append("a", wide[rows])
            writer.append("b", wide.T[rows : rows + 1] if rows < 3 else wide.T[3:])  # not contiguous
    read = load_file(path)
    assert torch.equal(read["a"], wide.to(torch.bfloat16))
    assert torch.equal(read["b"], wide.T)


def test_more_than_a_block_is_converted_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.builders.safetensors_writer.BLOCK_ELEMENTS", 7)
    tensor = torch.randn(5, 9)
    with SafetensorsWriter(tmp_path / "x.safetensors", {"a": (torch.float16, (5, 9))}) as writer:
        writer.append("a", tensor)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], tensor.half())


def test_incomplete_and_overfull_tensors_are_errors(tmp_path: Path) -> None:
    layout = {"a": (torch.float32, (2, 2))}
    with pytest.raises(ValueError, match="a is not complete: 8 bytes are missing"):
        with SafetensorsWriter(tmp_path / "short.safetensors", layout) as writer:
            writer.append("a", torch.ones(2))
    with pytest.raises(ValueError, match="a is given more elements"):
        with SafetensorsWriter(tmp_path / "long.safetensors", layout) as writer:
            writer.append("a", torch.ones(5))


# ---- the folder ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint of two ranks in bfloat16."""
    folder = tmp_path_factory.mktemp("checkpoint")
    family = TinyFamily(HfConfig(CONFIG), {})
    model = write_folder(folder / "hf", checkpoint_tensors(expected_weights(family)))
    with HfFolder(model) as opened:
        convert_family(opened, family, folder / "out", "bfloat16", 2, ReplayConfig(), lambda *_: None, print)
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


@pytest.fixture
def checkpoint(tmp_path: Path, pristine: dict[str, bytes]) -> Path:
    for name, content in pristine.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def refused(folder: Path, *parts: str, rank: int = 0) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_rank(folder, rank)
    # Folders of tests are named after them, and would satisfy many a part.
    message = str(caught.value).replace(str(folder), "")
    assert "\n" not in message
    for part in parts:
        assert part in message


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "config.json").read_text())
    change(data)
    (folder / "config.json").write_text(json.dumps(data))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "rank0.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "rank0.safetensors")


def test_a_config_that_cannot_be_read(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    (checkpoint / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Is a directory$"):
        CheckpointConfig.read(checkpoint)


def test_config_is_read_back(checkpoint: Path) -> None:
    config = CheckpointConfig.read(checkpoint)
    assert config.decoder == TinyFamily(HfConfig(CONFIG), {}).decoder()
    assert json.loads(json.dumps(config.to_dict())) == json.loads((checkpoint / "config.json").read_text())


def test_config_has_the_keys_of_tensorrt_llm(checkpoint: Path) -> None:
    data = json.loads((checkpoint / "config.json").read_text())
    assert data["architecture"] == ARCHITECTURE
    assert data["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert {"dtype", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "quantization"} <= set(
        data
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_loaded_with_the_layout_of_the_config(checkpoint: Path, rank: int) -> None:
    layout = CheckpointConfig.read(checkpoint).rank_layout()
    loaded = load_rank(checkpoint, rank)
    assert layout_of(loaded) == layout
    assert {dtype for dtype, _ in layout.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_beyond_tp_size(checkpoint: Path, rank: int) -> None:
    refused(checkpoint, f"no rank {rank}", "tp_size is 2", rank=rank)


def test_missing_rank_file(checkpoint: Path) -> None:
    (checkpoint / "rank1.safetensors").unlink()
    refused(checkpoint, "lacks rank1.safetensors")


def test_surplus_rank_file(checkpoint: Path) -> None:
    (checkpoint / "rank2.safetensors").write_bytes(b"")
    refused(checkpoint, "beyond", "rank2.safetensors")


def test_truncated_rank_file(checkpoint: Path, pristine: dict[str, bytes]) -> None:
    (checkpoint / "rank0.safetensors").write_bytes(pristine["rank0.safetensors"][:-10])
    refused(checkpoint, "rank0.safetensors", "truncated")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: tensors.pop("transformer.ln_f.weight"), ["lacks transformer.ln_f.weight"]),
        (lambda tensors: tensors.update(ghost=torch.ones(1)), ["unknown", "ghost"]),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(51, 32, dtype=torch.bfloat16)}),
            ["lm_head.weight", "[51, 32]", "[26, 32]"],
        ),
        (lambda tensors: tensors.update({"lm_head.weight": torch.ones(26, 32)}), ["lm_head.weight", "F32", "BF16"]),
    ],
)
def test_tensors_that_do_not_fit_the_config(checkpoint: Path, change: Callable, parts: list[str]) -> None:
    edit_tensors(checkpoint, change)
    refused(checkpoint, "rank0.safetensors", *parts)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda data: data.update(architecture="LlamaForCausalLM"), "not a checkpoint of trtllm-replayssm"),
        (lambda data: data.pop("replayssm"), "not a checkpoint of trtllm-replayssm"),
        (lambda data: data["replayssm"].update(format_version=99), "format 99"),
        (lambda data: data.pop("dtype"), "config.json is damaged: it has no 'dtype'"),
        (lambda data: data.update(dtype="int8"), "config.json is damaged"),
        (lambda data: data.update(mapping=None), "is damaged: it has parts of other types or names"),
        (lambda data: data["mapping"].update(tp_size="2"), "config.json is damaged"),
        (lambda data: data["mapping"].update(tp_size=0), "config.json is damaged"),
        (lambda data: data["mapping"].update(tp_size=3), "config.json is damaged"),
        (lambda data: data["replayssm"].pop("decoder"), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"].update(layers=3), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"].update(hidden_size="32"), "config.json is damaged"),
        (
            lambda data: data["replayssm"]["decoder"]["layers"][0].update(kind="mamba9"),
            "a layer 'mamba9', which is not known",
        ),
        (lambda data: data["replayssm"]["decoder"]["layers"][0].pop("kind"), "is damaged: it has no 'kind'"),
        (lambda data: data["replayssm"]["decoder"]["layers"][0].update(num_heads=None), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"]["layers"][0].update(novelty=1), "config.json is damaged"),
        (lambda data: data["replayssm"]["replay"].update(window=0), "config.json is damaged"),
        (lambda data: data["replayssm"]["replay"].update(novelty=1), "config.json is damaged"),
        (lambda data: data["replayssm"].update(eos_token_ids=None), "config.json is damaged"),
        (lambda data: data["replayssm"].update(eos_token_ids=["2"]), "config.json is damaged"),
        (lambda data: data["replayssm"].update(num_tokens=1.5), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"].update(vocab_size=0), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"].update(norm_epsilon="1e-5"), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"]["layers"][1].update(rope={"dim": 8}), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"]["layers"][2].update(activation="gelu"), "config.json is damaged"),
        (lambda data: data["replayssm"]["decoder"]["layers"][3].update(top_k=True), "config.json is damaged"),
    ],
)
def test_damaged_config(checkpoint: Path, change: Callable, part: str) -> None:
    edit_config(checkpoint, change)
    refused(checkpoint, part)


#: Of sentences that Python writes for programmers.
PYTHON_WORDS = re.compile(
    "NoneType|object|argument|subscript|iterable|modulo|attribute|mapping|__|sequence|supported|format"
)


def test_no_value_of_a_config_is_refused_in_words_of_python(checkpoint: Path) -> None:
    original = json.loads((checkpoint / "config.json").read_text())

    def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, part in parts:
            yield (*way, key)
            yield from places(part, (*way, key))

    sentences = set()
    for *way, last in places(original):
        if last in ("format_version", "architecture") or (not way and last == "replayssm"):
            continue
        for odd in (None, "ab", [1], ["ab"], [], {"a": 1}, {}, {"kind": []}, True, 0, -1, 1.5):
            data = copy.deepcopy(original)
            part = data
            for key in way:
                part = part[key]
            part[last] = odd
            try:
                CheckpointConfig.from_dict(data, "FILE")
            except CheckpointError as error:
                sentences.add(error.message.removeprefix("FILE is damaged: "))
    assert len(sentences) > 100
    assert [sentence for sentence in sentences if PYTHON_WORDS.search(sentence)] == []


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_config_that_is_not_an_object(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, "config.json")


def test_missing_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "config.json does not exist")
