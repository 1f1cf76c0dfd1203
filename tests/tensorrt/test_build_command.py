"""``build`` for TensorRT on machines that cannot build: plain refusals, and networks as tables and files all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch

# Before the bindings of test_a_builder_that_cannot_be_had, whose libraries define the same names.
pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from lean_runtime import missing, tensorrt_bindings

from trtllm_replayssm import compat
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.cli import phases
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime import build as building
from trtllm_replayssm.runtime.build import engine_config, read_checkpoint
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
from trtllm_replayssm.runtime.tensorrt.dry_run import dry_run, visualise
from trtllm_replayssm.runtime.tensorrt.plans import any_machine, emitted_plans

OPTIONS = BuildOptions(max_batch_size=4, max_seq_len=125, max_draft_len=3, engine_flavour="tensorrt")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_checkpoint(tmp_path_factory.mktemp("models") / "checkpoint", synthetic.decoder())


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("no_such_module",), "tensorrt_rtx": ("nor_this_one",)})


def build(checkpoint: Path, output: Path, *options: str) -> int:
    limits = ["--max_batch_size", "4", "--max_seq_len", "125", "--max_draft_len", "3"]
    return main(["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(output), *limits, *options])


@pytest.mark.usefixtures("nothing_installed")
def test_without_tensorrt_one_sentence_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(checkpoint, tmp_path / "engine", "--engine_flavour", "tensorrt") == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: tensorrt is not installed"
    assert "'.[tensorrt]'" in hint
    assert "--engine_flavour embedded" in hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_installed")
def test_options_that_an_embedded_engine_cannot_follow_are_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flavour may have been chosen by the program."""
    options = ("--strip_plan", "--aliased_state", "--output_timing_cache", str(tmp_path / "cache"))
    assert build(checkpoint, tmp_path / "engine", *options) == 0
    sentence = "warning: --aliased_state, --strip_plan, --output_timing_cache: of no use to the embedded engine"
    assert sentence in capsys.readouterr().err
    assert build(checkpoint, tmp_path / "engine") == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_installed")
def test_command_lines_of_trtllm_build_work(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--gemm_plugin", "auto", "--max_input_len", "64", "--remove_input_padding", "enable", "--workers", "1")
    assert build(checkpoint, tmp_path / "engine", *options, "--max_beam_width", "1", "--dry_run") == 0
    sentence = "warning: --max_input_len, --workers, --remove_input_padding, --gemm_plugin: of trtllm-build"
    assert sentence in capsys.readouterr().err
    assert build(checkpoint, tmp_path / "engine", "--max_beam_width", "4") == 1
    assert "error: --max_beam_width is 4; there is no beam search" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorrt_bindings()
    assert build(checkpoint, tmp_path / "engine", "--engine_flavour", "tensorrt") == 1
    error, _ = capsys.readouterr().err.splitlines()
    assert error.startswith("error: TensorRT 11.")
    assert error.endswith("builds on the GPU that will run the engine, and this machine has none")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_builder_that_cannot_be_had_is_one_sentence() -> None:
    """The genuine bindings, whose builder factory answers null here."""
    tensorrt = compat.TensorRT.of(tensorrt_bindings(), "tensorrt")
    with pytest.raises(EngineError, match=r"^TensorRT 11\.\S+ cannot build engines on this machine$"):
        tensorrt.builder(tensorrt.module.Logger(tensorrt.module.Logger.ERROR))


@pytest.mark.usefixtures("nothing_installed")
def test_the_default_is_what_can_be_built_here(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CheckpointConfig.read(checkpoint)
    assert engine_config(config, BuildOptions(engine_flavour="auto")).engine_flavour == "embedded"
    monkeypatch.setattr(building, "tensorrt_builds_here", lambda: True)
    assert engine_config(config, BuildOptions(engine_flavour="auto")).engine_flavour == "tensorrt"


@pytest.mark.usefixtures("nothing_installed")
def test_dry_run_needs_no_tensorrt(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(checkpoint, tmp_path / "engine", "--dry_run") == 0
    shown = capsys.readouterr().out
    assert "rank0.engine: for compute capability" in shown
    assert "checked by this package; no TensorRT is installed" in shown
    for text in ("replayssm::advance", "replayssm::mamba2", "transformer.layers.6.attention", "int32 [rows, tokens]"):
        assert text in shown
    assert "1 to 125, usually 125" in shown
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_tensorrt_rtx_shows_the_same_network(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut at the plugin layers, whose rows differ by what cutting adds."""
    monkeypatch.setattr(compat, "MODULES", compat.MODULES | {"tensorrt": ("no_such_module",)})
    (genuine,) = dry_run(checkpoint, OPTIONS).networks
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("no_such_module",), "tensorrt_rtx": ("nor_this_one",)})
    (own,) = dry_run(checkpoint, OPTIONS).networks
    assert genuine.checked_by.startswith("TensorRT-RTX 1.")
    mine = {row.scope: row for row in own.rows}
    for row in genuine.rows:
        assert mine[row.scope].weight_bytes == row.weight_bytes
        assert {k: n for k, n in mine[row.scope].layers.items() if n} == {
            k: n for k, n in row.layers.items() if k != "IDENTITY"
        }
        assert [p for p in mine[row.scope].plugins if p != "replayssm::advance"] == row.plugins


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are Linux's")
@pytest.mark.usefixtures("nothing_installed")
def test_weights_stay_in_the_checkpoint_s_file(checkpoint: Path) -> None:
    """What constants point at is the mapped file itself, and no second copy in this process."""
    config, _ = read_checkpoint(checkpoint, OPTIONS)
    ((_, step, _),) = emitted_plans(checkpoint, config, 0, any_machine())
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [fields[0].split("-") for fields in maps if fields[-1] == str(checkpoint / "rank0.safetensors")]
    ranges = [(int(first, 16), int(end, 16)) for first, end in mapped]
    assert ranges
    held = {id(memory) for memory in step.emitter.named_weights.values()}
    matrices = [name for name, weight in step.weights.items() if weight.ndim > 1]
    assert len(matrices) > 30
    for name in matrices:
        memory = step.weights[name]
        assert id(memory) in held, name
        assert any(first <= memory.data_ptr() < end for first, end in ranges), name


@pytest.mark.usefixtures("nothing_installed")
def test_networks_are_written_as_onnx(checkpoint: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="pip install '.[onnx]'")
    (path,) = visualise(checkpoint, OPTIONS, tmp_path / "networks")
    assert path.name == "rank0.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model)
    nodes = model.graph.node
    # advance, four recurrent layers and their convolutions
    assert sum(node.op_type == "PLUGIN_V3" for node in nodes) == 9
    assert {"transformer.layers.0.mamba2"} <= {node.name.rpartition("/")[0] for node in nodes}
    bound = {tensor.name for tensor in model.graph.output}
    assert {"logits", "cursors_out", "transformer.layers.0.mamba2.state_out"} <= bound
    sizes = {t.name: [d.dim_param or d.dim_value for d in t.type.tensor_type.shape.dim] for t in model.graph.input}
    assert sizes["input_ids"] == ["rows", "tokens"]
    assert [path.name for path in (tmp_path / "networks").iterdir()] == ["rank0.onnx"]


def test_folder_for_networks_that_cannot_be_made_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be made: File exists"):
        list(visualise(checkpoint, OPTIONS, tmp_path / "file"))


def test_embedded_engines_have_no_network(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(checkpoint, tmp_path / "engine", "--dry_run", "--engine_flavour", "embedded") == 1
    assert "an embedded engine has no network to show" in capsys.readouterr().err


def test_build_shows_the_phases_of_tensorrt_on_a_terminal(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One display of bars, told by what the builder reports."""

    def build_engine(checkpoint: Path, output: Path, options: BuildOptions, phases: phases.Phases) -> EngineConfig:
        phases("Building the engine", 0, 3)
        phases("Tactics", 0, 10)
        phases("Tactics", 10, 10)
        phases("Building the engine", 3, 3)
        return replace(read_checkpoint(checkpoint, options)[0], rank_bytes=(1,))

    monkeypatch.setattr(building, "tensorrt_builds_here", lambda: True)
    monkeypatch.setattr(building, "build_engine", build_engine)
    monkeypatch.setattr(phases.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert build(checkpoint, tmp_path / "engine") == 0
    captured = capsys.readouterr()
    assert "Building the engine" in captured.err
    assert "done in" in captured.err
    assert "tensorrt" in captured.out


def test_phases_have_bars_while_they_last() -> None:
    progress = pytest.importorskip("rich.progress")
    with progress.Progress(disable=True) as shown:
        bars = phases.PhaseBars(shown)
        bars.told("outer", 0, 2)
        bars.told("inner", 0, 5)
        bars.told("inner", 3, 5)
        assert [(t.description, t.completed, t.total) for t in shown.tasks] == [("outer", 0, 2), ("inner", 3, 5)]
        bars.told("inner", 5, 5)
        bars.told("outer", 1, 2)
        assert [(t.description, t.completed) for t in shown.tasks] == [("outer", 1)]
        bars.told("outer", 2, 2)
        assert shown.tasks == []
