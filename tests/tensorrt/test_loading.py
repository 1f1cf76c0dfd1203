"""Engine folders of the flavour tensorrt: what a build writes, and what loading refuses in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import rtx
from engine_pair import TOLERANCE, Pair, options, tokens
from stand_in import Builder, CudaEngine

from trtllm_replayssm import compat
from trtllm_replayssm.builders.model import Mtp
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import CheckpointError, EngineError, UserError
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.network.tensorrt.options import PlanOptions
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tensorrt import engine as loading
from trtllm_replayssm.runtime.tensorrt import refit as refitting
from trtllm_replayssm.runtime.tensorrt.plans import genuine

# ---- what loading refuses --------------------------------------------------------------------------------------------


def refused(pair: Pair, monkeypatch: pytest.MonkeyPatch, match: str) -> EngineError:
    with pytest.raises(EngineError, match=match) as error:
        pair.load(monkeypatch)
    return error.value


@pytest.fixture
def small(tmp_path: Path) -> Pair:
    return Pair(tmp_path, synthetic.decoder(synthetic.LAYERS[:1]))


def edited(pair: Pair, **changes: Any) -> None:
    """Change the record of the plans in config.json."""
    path = pair.folder / "config.json"
    data = json.loads(path.read_text())
    data["replayssm"]["tensorrt"].update(changes)
    path.write_text(json.dumps(data))


def test_another_tensorrt_is_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(small, tensorrt_version="10.14.1.48")
    error = refused(small, monkeypatch, r"was built with TensorRT 10\.14\.1\.48, and 11\.4\.0\.106 is installed$")
    assert "trtllm-replayssm build" in error.hint


def test_another_gpu_is_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(small, compute_capability="10.3")
    refused(small, monkeypatch, r"was built for compute capability 10\.3, and cpu has 9\.0$")


def test_a_cpu_is_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_tensorrt", lambda flavours: small.stand_in.tensorrt())
    with pytest.raises(EngineError, match="runs on a GPU only, and not on cpu") as error:
        Engine.load(small.folder, device="cpu")
    assert "--engine_flavour embedded" in error.value.hint


def test_no_tensorrt_is_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MODULES", {"tensorrt": ("no_such_module",)})
    with pytest.raises(EngineError, match=r"^tensorrt is not installed$"):
        Engine.load(small.folder, device="cpu")


def test_missing_and_cut_files_are_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small.folder / "rank0.engine"
    content = plan.read_bytes()
    plan.write_bytes(content[:-1])
    refused(small, monkeypatch, rf"rank0\.engine has {len(content) - 1} bytes, but was built with {len(content)}")
    plan.unlink()
    refused(small, monkeypatch, r"rank0\.engine is missing")


def test_damaged_plans_are_refused_with_tensorrt_s_reason(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small.folder / "rank0.engine"
    plan.write_bytes(b"x" * plan.stat().st_size)
    error = refused(small, monkeypatch, r"rank0\.engine cannot be loaded: magicTag is wrong$")
    assert "trtllm-replayssm build" in error.hint


def test_genuine_runtime_refuses_damaged_plans_in_one_sentence(tmp_path: Path) -> None:
    """Of TensorRT-RTX, which reads a plan's header without a GPU."""
    trt = rtx().module
    log = tensorrt_log(trt)
    (tmp_path / "rank0.engine").write_bytes(b"no plan at all" * 40)
    with pytest.raises(EngineError, match=r"rank0\.engine cannot be loaded: Serialization assertion .*magic") as error:
        loading.deserialised(tmp_path / "rank0.engine", trt.Runtime(log), log)
    assert "\n" not in error.value.message


def test_plans_of_another_program_are_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    names = CudaEngine.get_tensor_name
    monkeypatch.setattr(CudaEngine, "get_tensor_name", lambda self, i: names(self, i).replace("modes", "host_modes"))
    refused(small, monkeypatch, r"rank0\.engine has no tensor modes, which this version binds")


def test_damaged_records_are_refused(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(small, compute_capability="new")
    refused(small, monkeypatch, r"config\.json is damaged: compute_capability 'new'")
    edited(small, compute_capability="9.0", prefill_tokens="many")
    refused(small, monkeypatch, r"config\.json is damaged: prefill_tokens of PlanRecord is 'many'")


# ---- what a build writes ---------------------------------------------------------------------------------------------


def test_engine_folder(small: Pair) -> None:
    config = json.loads((small.folder / "config.json").read_text())
    assert config["replayssm"]["engine_flavour"] == "tensorrt"
    assert config["replayssm"]["tensorrt"] == {
        "tensorrt_version": "11.4.0.106",
        "compute_capability": "9.0",
        "prefill_tokens": 125,
        "gather_context_logits": True,
        "aliased": False,
        "just_in_time": False,
        "stripped": False,
        "weight_streaming": False,
        "scaled_matmul": False,
        "files": {path.name: path.stat().st_size for path in sorted(small.folder.glob("rank*"))},
    }
    assert {"plugin_version", "package_version", "format_version"} <= config["replayssm"].keys()
    assert len({path.stat().st_mode for path in small.folder.iterdir()}) == 1
    assert config["build_config"]["max_batch_size"] == 4


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX")
def test_genuine_plans_are_written(tmp_path: Path) -> None:
    """By the builder of TensorRT-RTX, cut at the plugin layers: two plans of one rank, and what they measured."""
    layers = synthetic.LAYERS[:2] + synthetic.LAYERS[6:7]
    model = replace(synthetic.decoder(layers), mtp=Mtp(synthetic.LAYERS[6:7]))
    source, cache = synthetic.write_checkpoint(tmp_path / "checkpoint", model), tmp_path / "timing.cache"
    chosen, folder = options("tensorrt", plan=PlanOptions(output_timing_cache=cache)), tmp_path / "engine"
    config = build_engine(source, folder, chosen, target=genuine(rtx(), (8, 9)))
    plans = {"rank0.engine", "rank0.mtp.engine"}
    assert {path.name for path in folder.iterdir()} == {"config.json", "rank0.state.safetensors", *plans}
    assert config == EngineConfig.read(folder)
    record = config.tensorrt
    assert record is not None
    assert (record.tensorrt_version, record.capability) == (rtx().version_text, (8, 9))
    assert record.files == {path.name: path.stat().st_size for path in folder.glob("rank*")}
    assert min(record.files[plan] for plan in plans) > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "engine", "timing.cache"]


def test_a_build_that_is_stopped_leaves_nothing(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in small.folder.iterdir()}
    monkeypatch.setattr(Builder, "build_serialized_network", lambda self, network, config: None)
    with pytest.raises(EngineError, match="TensorRT could not build the engine"):
        small.build()
    assert {path.name: path.read_bytes() for path in small.folder.iterdir()} == before
    assert sorted(path.name for path in small.folder.parent.iterdir()) == ["checkpoint", "tensorrt"]


def test_declared_aliases_reach_the_builder(tmp_path: Path) -> None:
    decoder, feature = synthetic.decoder(synthetic.LAYERS[:1]), rtx().module.PreviewFeature.ALIASED_PLUGIN_IO_10_03
    for declared in (False, True):
        pair = Pair(tmp_path / str(declared), decoder, aliased_state=declared)
        assert [config.get_preview_feature(feature) for config in pair.stand_in.configs] == [declared]


def test_a_timing_cache_that_cannot_be_written_is_refused_before_the_build(small: Pair, tmp_path: Path) -> None:
    small.options = replace(small.options, plan=PlanOptions(output_timing_cache=tmp_path / "none" / "timing.cache"))
    builds = len(small.stand_in.configs)
    with pytest.raises(UserError, match=r"timing\.cache cannot be written: .*none is not a folder"):
        small.build()
    assert len(small.stand_in.configs) == builds


def test_stripped_plans_are_given_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of a network that is only recorded."""
    pair = Pair(tmp_path, plan=PlanOptions(strip_plan=True))
    error = refused(pair, monkeypatch, "tensorrt holds plans without weights")
    assert "trtllm-replayssm refit" in error.hint
    monkeypatch.setattr(refitting, "load_tensorrt", lambda flavours: pair.stand_in.tensorrt())
    full, folders = tmp_path / "full", ["--checkpoint_dir", str(pair.source), "--engine_dir", str(pair.folder)]
    assert main(["refit", *folders, "--output_dir", str(full)]) == 0
    session = Session(Engine.load(full, device="cpu"))
    expected = Session(pair.embedded).prefill(0, tokens(1, 9, 0)[0])
    torch.testing.assert_close(session.prefill(0, tokens(1, 9, 0)[0]), expected, **TOLERANCE)
    with pytest.raises(EngineError, match="full has its weights"):
        refitting.refit_engine(pair.source, full, tmp_path / "again")


def test_weights_of_another_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, synthetic.decoder(synthetic.LAYERS[:1]), plan=PlanOptions(strip_plan=True))
    other = synthetic.write_checkpoint(tmp_path / "other", synthetic.decoder(synthetic.LAYERS[:2]))
    with pytest.raises(CheckpointError, match=r"other is not of the model that .*tensorrt was built for"):
        refitting.refit_engine(other, pair.folder, tmp_path / "full")


def test_weight_streaming_has_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, synthetic.decoder(synthetic.LAYERS[:1]), plan=PlanOptions(weight_streaming=True))
    engine = pair.load(monkeypatch)
    assert engine.cuda_engines["decoder"].weight_streaming_budget_v2 == 7
    assert pair.stand_in.configs[0].get_flag(rtx().module.BuilderFlag.WEIGHT_STREAMING)
