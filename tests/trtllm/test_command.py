"""trtllm-build as a command: a shim on its command line, workers in processes of their own, and where it does not exist."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.demo.models import make_checkpoint
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.replay import ReplayConfig

HERE = Path(__file__).parent
#: What trtllm-build, which shows no hints, must say in the sentence.
OURS = "trtllm-replayssm build --engine_flavour tensorrt builds the same checkpoint without it"
EXAMPLE = HERE.parent.parent / "examples" / "trtllm_build" / "build.sh"
LAYERS = (Mamba2(4, 8, 16, 2, 4, 1e-5), Attention(4, 2, 16, 0.25))


def trtllm_build(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The stand-in's command, as the real one is called."""
    command = [sys.executable, "-m", "tensorrt_llm.commands.build", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


def environment() -> dict[str, str]:
    """In which Python finds the stand-in."""
    folders = [HERE / "stand_in", HERE, HERE.parent / "tensorrt", HERE.parent]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}


def test_two_workers_build_two_ranks(tmp_path: Path) -> None:
    """Workers are spawned: they find the class by its module, and the config's class through the registration."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")
    model = synthetic.decoder(LAYERS)
    checkpoint = synthetic.write_checkpoint(
        tmp_path / "checkpoint", model, tp_size=2, dtype="bfloat16", replay=ReplayConfig(window=8, max_draft_len=1)
    )
    engine, shim = tmp_path / "engine", HERE / "cut_shim.py"
    files = ("--checkpoint_dir", checkpoint, "--output_dir", engine, "--model_cls_file", shim)
    sizes = ("--max_batch_size", "2", "--max_seq_len", "63", "--max_num_tokens", "32")
    done = trtllm_build(*files, "--model_cls_name", "CutForCausalLM", *sizes, "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in engine.iterdir()) == ["config.json", "rank0.engine", "rank1.engine"]
    written = json.loads((engine / "config.json").read_text())
    assert written["build_config"]["max_seq_len"] == 63
    described = CheckpointConfig.from_dict(written["pretrained_config"], "engine")
    assert described == CheckpointConfig.read(checkpoint)


def test_the_example_builds_an_engine(tmp_path: Path) -> None:
    """The script as it is; only the file of model classes is another, because there are no plugin layers here."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")
    make_checkpoint("kimi_linear", tmp_path / "model")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, module in (("trtllm-replayssm", "trtllm_replayssm"), ("trtllm-build", "tensorrt_llm.commands.build")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    changes = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "MODEL_CLS_FILE": str(HERE / "cut_shim.py")}
    done = subprocess.run(
        [EXAMPLE, tmp_path / "model", tmp_path, "1", "CutForCausalLM"],
        env=environment() | changes,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "engine").iterdir()) == ["config.json", "rank0.engine"]
    options = json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]
    assert (options["max_batch_size"], options["max_seq_len"], options["max_num_tokens"]) == (8, 4096, 2048)


def test_without_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trtllm_replayssm.trtllm.model_cls", raising=False)
    with pytest.raises(EngineError, match=f"^tensorrt-llm is not installed; {OURS}$") as error:
        importlib.import_module("trtllm_replayssm.trtllm.model_cls")
    assert "'.[trtllm]'" in error.value.hint


def test_the_example_without_trtllm_build_says_what_builds_instead(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, EXAMPLE, tmp_path / "model", tmp_path / "work"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("trtllm-build is not installed; ")
    assert "trtllm-replayssm build --engine_flavour tensorrt" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = subprocess.run([bash, EXAMPLE], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: build.sh MODEL_DIR WORK_DIR" in done.stderr


def install(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensorrt-llm 1.4.0 whose package is ``code``, without a builder."""
    (folder / "tensorrt_llm").mkdir()
    (folder / "tensorrt_llm" / "__init__.py").write_text(code)
    information = folder / "tensorrt_llm-1.4.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.4.0\n")
    monkeypatch.syspath_prepend(folder)
    # Set first, so that what the test imports is taken away again.
    for name in ("tensorrt_llm", "trtllm_replayssm.trtllm.model_cls"):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("", r"^tensorrt-llm 1\.4\.0 has no engine builder, which was removed after 1\.2; "),
        (
            "raise OSError('libnvinfer.so.10: cannot open shared object file')",
            r"^tensorrt-llm 1\.4\.0 cannot be imported \(libnvinfer\.so\.10: cannot open shared object file\); ",
        ),
    ],
    ids=["without a builder", "broken"],
)
def test_with_a_tensorrt_llm_that_builds_no_engines(
    code: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from 1.3 on: the package is there, its builder is not. Or a library that it needs is not."""
    install(tmp_path, code, monkeypatch)
    with pytest.raises(EngineError, match=f"{sentence}{OURS}$"):
        importlib.import_module("trtllm_replayssm.trtllm.model_cls")
