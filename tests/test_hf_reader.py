"""Reading Hugging Face folders: what is read, what is warned of, and one test per refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_family import CONFIG, write_folder, write_index

from trtllm_replayssm.builders.hf.folder import INDEX_FILE, HfFolder
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4).to(torch.bfloat16),
    "c": torch.tensor(2.5, dtype=torch.float16),
    "d": torch.arange(3.0, dtype=torch.float64),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards: a and c in the first, b and d in the second."""
    return write_folder(tmp_path / "hf", TENSORS, shards=2)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", TENSORS)


def refused(path: Path, *parts: str) -> CheckpointError:
    """Opens the folder, expects a refusal of one sentence that contains the parts, and returns it."""
    with pytest.raises(CheckpointError) as caught:
        HfFolder(path, print)
    # Folders of tests are named after them, and would satisfy many a part.
    message = str(caught.value).replace(str(path.parent), "")
    assert "\n" not in message
    for part in parts:
        assert part in message
    return caught.value


def weight_map(path: Path) -> dict[str, str]:
    return json.loads((path / INDEX_FILE).read_text())["weight_map"]


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [0, 1, 2, 4])
def test_tensors_are_read_back_exactly(tmp_path: Path, shards: int) -> None:
    warnings: list[str] = []
    with HfFolder(write_folder(tmp_path, TENSORS, shards=shards), warnings.append) as opened:
        assert opened.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        for name, tensor in TENSORS.items():
            read = opened.tensor(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor)
        assert opened.config == CONFIG
    assert warnings == []


def test_headers_alone_tell_the_shapes(folder: Path) -> None:
    opened = HfFolder(folder)
    assert opened.entries["b"].dtype == "BF16"
    assert all(file.descriptor is None for file in opened.files), "no file may be open before a tensor is read"


def test_files_of_the_hub_cache_are_links_to_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "f00", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert HfFolder(snapshot).shapes.keys() == TENSORS.keys()


def test_a_folder_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert HfFolder(tmp_path / "link").shapes.keys() == TENSORS.keys()


def test_stray_shards_are_named_and_not_used(folder: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, folder / "model-00003-of-00003.safetensors")
    save_file({"mtp.fc.weight": torch.ones(2)}, folder / "mtp.safetensors")
    (folder / "broken.safetensors").write_bytes(b"x")
    warnings: list[str] = []
    opened = HfFolder(folder, warnings.append)
    assert torch.equal(opened.tensor("a"), TENSORS["a"])
    assert "mtp.fc.weight" not in opened.shapes
    assert [Path(warning.split(" is ")[0]).name for warning in warnings] == [
        "broken.safetensors",
        "model-00003-of-00003.safetensors",
        "mtp.safetensors",
    ]
    assert "mtp.fc.weight" in warnings[2]
    assert "nowhere else" not in warnings[1]


def test_a_single_file_wins_over_an_index_of_another_save(folder: Path) -> None:
    save_file({"e": torch.ones(1)}, folder / "model.safetensors")
    warnings: list[str] = []
    assert HfFolder(folder, warnings.append).shapes == {"e": (1,)}
    assert INDEX_FILE in warnings[0]
    assert any(FIRST in warning for warning in warnings)


# ---- refusals: folder ------------------------------------------------------------------------------------------------


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", "does not exist")


def test_file_instead_of_folder(single: Path) -> None:
    refused(single / "model.safetensors", "is a file")


def test_missing_config(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, "config.json does not exist")


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("name", ["rank0.safetensors", "rank1.engine"])
def test_a_checkpoint_or_an_engine_is_no_model_folder(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    assert "build --checkpoint_dir" in refused(single, "holds rank files").hint


def test_shards_without_index(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    assert "index" in refused(folder, "neither").hint


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("pytorch_model.bin", "pickled"),
        ("pytorch_model-00001-of-00002.bin", "pickled"),
        ("model.pt", "pickled"),
        ("weights.pth", "pickled"),
        ("epoch.ckpt", "pickled"),
        ("model-Q4_K_M.gguf", "GGUF"),
        ("tf_model.h5", "another framework"),
    ],
)
def test_other_weights(single: Path, file: str, what: str) -> None:
    (single / "model.safetensors").rename(single / file)
    refused(single, what, file)


def test_adapter(single: Path) -> None:
    (single / "adapter_config.json").write_text("{}")
    assert "merge" in refused(single, "adapter").hint


def test_mlx_metadata(single: Path) -> None:
    save_file(TENSORS, single / "model.safetensors", metadata={"format": "mlx"})
    refused(single, "MLX", "model.safetensors")


def test_mlx_convolution(single: Path) -> None:
    save_file({"layers.0.conv1d.weight": torch.ones(8, 4, 1)}, single / "model.safetensors")
    refused(single, "MLX", "layers.0.conv1d.weight", "[8, 4, 1]")


# ---- refusals: index -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_damaged_index(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    refused(folder, INDEX_FILE)


def test_index_with_a_tensor_twice(folder: Path) -> None:
    (folder / INDEX_FILE).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    refused(folder, INDEX_FILE, "a appears twice")


def test_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    refused(folder, "lacks 1 of 2 shards", SECOND)


def test_index_names_a_tensor_that_its_shard_lacks(folder: Path) -> None:
    write_index(folder, weight_map(folder) | {"ghost": FIRST})
    refused(folder, "ghost", FIRST)


def test_index_names_the_wrong_shard(folder: Path) -> None:
    write_index(folder, weight_map(folder) | {"a": SECOND})
    refused(folder, INDEX_FILE, "a is in", SECOND)


def test_shard_holds_a_tensor_that_the_index_lacks(folder: Path) -> None:
    write_index(folder, {name: shard for name, shard in weight_map(folder).items() if name != "a"})
    refused(folder, "does not list 1 tensors", "a")


def test_tensor_in_two_shards(folder: Path) -> None:
    save_file({name: TENSORS[name] for name in "abd"}, folder / SECOND)
    refused(folder, "a is both in", FIRST, SECOND)


@pytest.mark.parametrize(
    "shard",
    [
        "../hf/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "a\\b.safetensors",
        "x\0.safetensors",
    ],
)
def test_shard_outside_the_folder(folder: Path, shard: str) -> None:
    write_index(folder, weight_map(folder) | {"a": shard})
    refused(folder, "not in the folder")


@pytest.mark.parametrize("shard", ["model.bin", "", 3, None, ["x.safetensors"]])
def test_shard_that_is_no_safetensors_file(folder: Path, shard: object) -> None:
    write_index(folder, weight_map(folder) | {"a": shard})  # type: ignore[dict-item]
    refused(folder, INDEX_FILE, "not a safetensors file")


@pytest.mark.parametrize("file", [FIRST, "model.safetensors"])
def test_link_that_leaves_the_folder(folder: Path, tmp_path: Path, file: str) -> None:
    outside = tmp_path / "outside.safetensors"
    (folder / FIRST).rename(outside)
    (folder / file).symlink_to(outside)
    refused(folder, file, "leaves the folder")


def test_link_to_itself(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(FIRST)
    refused(folder, FIRST)


# ---- refusals: safetensors file --------------------------------------------------------------------------------------


def header(table: object, data: bytes = b"\0" * 8, pad: int = 0) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text + b" " * pad).to_bytes(8, "little") + text + b" " * pad + data


def one(dtype: object = "F32", shape: object = [2], offsets: object = [0, 8]) -> dict:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def two(first: list[int], second: list[int]) -> dict:
    return {name: {"dtype": "F32", "shape": [1], "data_offsets": at} for name, at in (("x", first), ("y", second))}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["truncated"]),
        (b"abc", ["truncated"]),
        (b"\xff" * 64, ["truncated or not a safetensors file"]),
        (b"GGUF" + b"\0" * 60, ["GGUF"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS pointer"]),
        (header(b"\xff\xfe{}"), ["header"]),
        (header(b"{nonsense"), ["header"]),
        (header(b"[" * 100_000), ["header"]),
        (header([1]), ["header"]),
        (header(b'{"x": 1, "x": 2}'), ["x appears twice"]),
        (header({"x": 1}), ["x", "damaged header"]),
        (header({"x": {"dtype": "F32"}}), ["x", "damaged header"]),
        (header(one(shape=[-2])), ["x", "damaged header"]),
        (header(one(shape=[True, 2])), ["x", "damaged header"]),
        (header(one(shape=["2"])), ["x", "damaged header"]),
        (header(one(shape=2)), ["x", "damaged header"]),
        (header(one(offsets=[0])), ["x", "damaged header"]),
        (header(one(offsets=[8, 0])), ["x", "-8 bytes"]),
        (header(one(dtype="F33")), ["x", "'F33'"]),
        (header(one(dtype=["F32"])), ["x", "F32"]),
        (header(one(shape=[0], offsets=[0, 0]), b""), ["x", "empty"]),
        (header(one(shape=[3])), ["x", "does not fit"]),
        (header(one(), b"\0" * 7), ["truncated"]),
        (header(one(), b"\0" * 9), ["1 bytes that belong to no tensor"]),
        (header(one(offsets=[4, 12]), b"\0" * 12), ["x", "gap"]),
        (header(two([0, 4], [0, 4])), ["overlaps"]),
        (header(two([0, 4], [8, 12]), b"\0" * 12), ["y", "gap"]),
    ],
)
def test_damaged_file(single: Path, content: bytes, parts: list[str]) -> None:
    (single / "model.safetensors").write_bytes(content)
    refused(single, "model.safetensors", *parts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_damage_of_a_header_goes_further_than_a_refusal(single: Path, data: st.DataObject) -> None:
    """Bytes of a sound file are changed or cut off: it is refused, or its entries still lie within the file."""
    pristine = single / "pristine"
    if not pristine.exists():
        (single / "model.safetensors").rename(pristine)
    content = bytearray(pristine.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]
    (single / "model.safetensors").write_bytes(content)
    try:
        entries = HfFolder(single).entries
    except CheckpointError:
        return
    assert all(0 < entry.start < entry.end <= len(content) for entry in entries.values())


def test_padded_header_is_fine(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(header(one(), pad=13))
    assert torch.equal(SafetensorsFile(tmp_path / "x.safetensors").read("x"), torch.zeros(2))


def test_header_of_absurd_length(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)
    with pytest.raises(CheckpointError, match="200000000 bytes long"):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e5m2])
def test_tensors_that_hold_no_weights(single: Path, dtype: torch.dtype) -> None:
    save_file({"q": torch.ones(4).to(dtype)}, single / "model.safetensors")
    with HfFolder(single) as opened, pytest.raises(CheckpointError, match=r"q has dtype .*, which is not read"):
        opened.tensor("q")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-4]), lambda path: path.unlink()])
def test_file_that_changes_after_it_was_opened(single: Path, damage: Callable[[Path], object]) -> None:
    opened = HfFolder(single)
    damage(single / "model.safetensors")
    last = max(opened.entries, key=lambda name: opened.entries[name].end)
    with pytest.raises(CheckpointError, match=f"{last}"):
        opened.tensor(last)
