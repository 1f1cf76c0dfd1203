"""The benchmark's peers as far as they need no GPU: which files are fetched, how modules load, which cases they take."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import product
from pathlib import Path

import pytest
import torch

# Behind everything else: the package is to be found where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import problem
from benchmarks.cases import MODELS, Case, DeltaModel
from benchmarks.peers import fetch, flashinfer_gdn, loader, peer
from benchmarks.peers.prebuild_flashinfer import telling_line
from benchmarks.subject import Unavailable, Unsuited
from trtllm_replayssm.errors import UserError


def archives(folder: Path) -> list[Path]:
    """A wheel and a source archive with one wanted file, one other, and one that would leave the folder."""
    names = ["pkg/kernel.py", "pkg/other.txt", "pkg/../../evil.py"]
    with zipfile.ZipFile(folder / "pkg-1-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "text")
    with tarfile.open(folder / "pkg-1.tar.gz", "w:gz") as source:
        for name in names:
            member = tarfile.TarInfo(f"pkg-1/{name}")
            member.size = 4
            source.addfile(member, io.BytesIO(b"text"))
    return [folder / "pkg-1-py3-none-any.whl", folder / "pkg-1.tar.gz"]


def test_only_wanted_files_are_unpacked(tmp_path):
    for number, archive in enumerate(archives(tmp_path)):
        target = tmp_path / str(number)
        assert fetch.unpack(archive, r".*\.py$", target) == 1
        assert [p.relative_to(target).as_posix() for p in target.rglob("*.py")] == ["pkg/kernel.py"]
        assert not list(tmp_path.glob("evil.py"))
        with pytest.raises(UserError, match="has none of the files"):
            fetch.unpack(archive, "nothing", target)


def test_a_module_is_loaded_without_its_package(tmp_path, monkeypatch):
    """Of the packages around it no __init__ runs; framework modules are stand-ins."""
    folder = tmp_path / "peer_pkg" / "ops"
    folder.mkdir(parents=True)
    for init in (tmp_path / "peer_pkg" / "__init__.py", folder / "__init__.py"):
        init.write_text("raise RuntimeError")
    (folder / "helper.py").write_text("two = 2")
    (folder / "kernel.py").write_text(
        "from peer_pkg.ops.helper import two\nfrom peer_pkg.env import one\nthree = one + two"
    )
    (folder / "needy.py").write_text("import a_module_that_is_nowhere")
    monkeypatch.setattr(loader, "_folder", tmp_path)
    loader.package("peer_pkg.env", one=1)
    assert loader.load("peer_pkg.ops.kernel").three == 3
    with pytest.raises(Unavailable, match="a_module_that_is_nowhere"):
        loader.load("peer_pkg.ops.needy")
    monkeypatch.setattr(loader, "_folder", tmp_path / "missing")
    for load in (loader.load, loader.whole):
        with pytest.raises(Unavailable, match="python -m benchmarks fetch"):
            load("peer_pkg.ops.kernel")


def test_the_cute_dsl_is_left_alone_by_a_python_that_it_is_not_for(tmp_path, monkeypatch):
    libraries = tmp_path / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    libraries.mkdir(parents=True)
    monkeypatch.setattr(loader, "_folder", tmp_path)
    (libraries / "_cutlass_ir.cu13.cpython-27-x86_64-linux-gnu.so").touch()
    assert not list(loader.cute_dsl())
    (libraries / f"_cutlass_ir.cu13{EXTENSION_SUFFIXES[0]}").touch()
    assert list(loader.cute_dsl()) == [libraries.parents[2]]


@pytest.mark.parametrize(
    ("subject", "taken"),
    [
        (flashinfer_gdn.Decode, {(1, torch.float32), (1, torch.bfloat16)}),
        (flashinfer_gdn.Snapshots, {(t, s) for t in (2, 4, 8) for s in (torch.float32, torch.bfloat16)}),
        (flashinfer_gdn.Replay, {(t, s) for t in (4, 8) for s in (torch.bfloat16, torch.float16)}),
    ],
)
def test_flashinfer_takes_what_its_delta_rule_is_written_for(subject, taken, tmp_path, monkeypatch):
    """Nothing else is missing with the folder: it says Unavailable where it would run, Unsuited elsewhere."""
    monkeypatch.setattr(loader, "_folder", tmp_path / "missing")
    for module in (problem, peer):
        monkeypatch.setattr(module, "DEVICE", "cpu")

    def reason(kind: str, shape: DeltaModel, tokens: int, state: torch.dtype) -> type[Exception]:
        monkeypatch.setitem(MODELS[kind], "small", shape)
        with pytest.raises((Unsuited, Unavailable)) as raised:
            subject([problem.Problem.random(Case(kind, "small", 2, tokens, state))])
        return raised.type

    for tokens, state in product((1, 2, 4, 8, 40), (torch.float32, torch.bfloat16, torch.float16)):
        wanted = Unavailable if (tokens, state) in taken else Unsuited
        assert reason("gated_delta", DeltaModel(1, 2), tokens, state) is wanted
        assert reason("gated_delta", DeltaModel(1, 2, dim=64), tokens, state) is Unsuited
        assert reason("kda", DeltaModel(2, 2, per_channel=True), tokens, state) is Unsuited


def test_prebuild_names_the_line_that_says_what_is_wrong():
    linking = (
        "[4/4] c++ x.o\n/usr/bin/ld: cannot find -lcudart: No such file\ncollect2: error: ld\nninja: build stopped"
    )
    assert telling_line(linking) == "/usr/bin/ld: cannot find -lcudart: No such file"
    assert telling_line("x.cu(3): error: expected a ;\nninja: build stopped") == "x.cu(3): error: expected a ;"
    assert telling_line("killed") == "killed"
