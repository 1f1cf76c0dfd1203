"""inspect: sizes of released models, what it says of folders, and the bytes that its model of a step predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_configs import PUBLISHED

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError
from trtllm_replayssm.inspection import Subject, inspect_model
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.subject import read_subject
from trtllm_replayssm.traffic import RecurrentBytes

MIB = 2**20
#: Model: layers by kind, MiB of float32 state of a recurrent layer, and of all.
EXPECTED = {
    "Nemotron Nano v2 9B": ({"mamba2": 27, "attention": 4, "mlp": 25}, 5, 135),
    "Nemotron 3 Nano 30B-A3B": ({"mamba2": 23, "attention": 6, "moe": 23}, 2, 46),
    "Nemotron 3 Super 120B-A12B": ({"mamba2": 40, "attention": 8, "moe": 40}, 4, 160),
    "Qwen3-Next 80B-A3B": ({"gated_delta": 36, "attention": 12, "moe": 48}, 2, 72),
    "Qwen3.5 27B": ({"gated_delta": 48, "attention": 16, "mlp": 64}, 3, 144),
    "Qwen3.5 35B-A3B": ({"gated_delta": 30, "attention": 10, "moe": 40}, 2, 60),
    "Qwen3.5 397B-A17B": ({"gated_delta": 45, "attention": 15, "moe": 60}, 4, 180),
    "Kimi-Linear 48B-A3B": ({"kda": 20, "mla": 7, "mlp": 1, "moe": 26}, 2, 40),
    "Ling-3.0-flash": ({"kda": 35, "mla": 7, "mlp": 1, "moe": 41}, 2, 70),
    "Ling-3.0-tiny": ({"kda": 18, "mla": 6, "mlp": 1, "moe": 23}, 1, 18),
    "Codestral-Mamba 7B": ({"mamba2": 64}, 4, 256),
}
#: Parameters in billions, of all and of one token, that the names of models promise (to the digits of the name).
NAMED_PARAMETERS = {
    "Nemotron 3 Nano 30B-A3B": (31.6, 3.58),
    "Qwen3-Next 80B-A3B": (79.7, 3.87),
    "Qwen3.5 27B": (26.9, 26.9),
    "Qwen3.5 35B-A3B": (34.7, 3.45),
    "Qwen3.5 397B-A17B": (396.3, 17.3),
    "Kimi-Linear 48B-A3B": (49.1, 3.48),
}


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(values: dict[str, Any], name: str = "config.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_from_bare_config(name: str, config_file: Any) -> None:
    report = inspect_model(read_subject(config_file(PUBLISHED[name])))
    kinds, per_layer, total = EXPECTED[name]
    assert report.kinds() == kinds
    assert {g.state_bytes_per_layer for g in report.layers if g.state_bytes} == {per_layer * MIB}
    assert report.total("state_bytes") == total * MIB
    if name in NAMED_PARAMETERS:
        billions = (report.parameters / 1e9, report.active_parameters / 1e9)
        assert billions == pytest.approx(NAMED_PARAMETERS[name], rel=5e-3)


def tiny(replay: ReplayConfig | None = None, **changes: Any) -> Subject:
    layers = (
        Mamba2(8, 16, 32, 2, 4, 1e-5),
        Mlp(96, "relu2"),
        Attention(4, 2, 16, 0.25),
        Moe(8, 3, 32, "swiglu", "sigmoid", shared=Mlp(48, "swiglu")),
        Mamba2(8, 16, 32, 2, 4, 1e-5),
    )
    values = {"dtype": "bfloat16", "tp_size": 1, "max_seq_len": 100} | changes
    return Subject("test", "Test", HybridDecoder(50, 64, 1e-5, layers), replay or ReplayConfig(), **values)


def test_bytes_of_a_tiny_model_by_hand() -> None:
    report = inspect_model(tiny(ReplayConfig(max_draft_len=3)))
    mamba, mlp, attention, moe = report.layers
    assert (mamba.count, mlp.count, attention.count, moe.count) == (2, 1, 1, 1)
    assert mamba.state_bytes == 2 * 8 * 16 * 32 * 4
    # 20 rows of x, B in bfloat16 and dt in float32; 7 rows of the convolution over x, B and C.
    assert mamba.ring_bytes == 2 * 20 * (8 * 16 * 2 + 2 * 32 * 2 + 8 * 4)
    assert mamba.conv_bytes == 2 * (3 + 4) * (8 * 16 + 2 * 2 * 32) * 2
    assert attention.kv_bytes_per_token == 2 * 2 * 16 * 2
    assert report.kv_bytes == 100 * attention.kv_bytes_per_token
    assert mlp.parameters == 64 + 2 * 64 * 96
    experts = 8 * 3 * 64 * 32
    assert moe.parameters == 64 + 8 * 64 + 8 + experts + 3 * 64 * 48
    assert moe.active_parameters == moe.parameters - experts * 5 // 8
    # The router stays in float32.
    assert moe.weight_bytes == 2 * moe.parameters + 2 * (8 * 64 + 8)
    assert report.parameters == sum(g.parameters for g in report.layers) + 2 * 50 * 64 + 64


def test_tensor_parallel_rank_holds_its_share() -> None:
    whole, half = inspect_model(tiny()), inspect_model(tiny(tp_size=2))
    assert half.total("state_bytes") * 2 == whole.total("state_bytes")
    assert half.parameters == whole.parameters
    assert half.weight_bytes < whole.weight_bytes
    with pytest.raises(UserError, match="cannot be divided over tp_size 3"):
        inspect_model(tiny(tp_size=3))


def test_kv_bytes_do_not_depend_on_drafts() -> None:
    assert inspect_model(tiny(ReplayConfig(max_draft_len=7))).kv_bytes == inspect_model(tiny()).kv_bytes


@pytest.mark.parametrize(
    ("state", "row", "window", "kibibytes"),
    [
        # Model of the traffic at H128 P64 N128 G8: 2 S without ReplaySSM; S + S/W + r (W-1)/2 + r (W-1)/W with it.
        (2**22, 18944, 1, 8192.0),
        (2**22, 18944, 8, 4688.94),
        (2**22, 18944, 16, 4508.09),
        (2**22, 18944, 32, 4528.67),
    ],
)
def test_steady_decode_traffic(state: int, row: int, window: int, kibibytes: float) -> None:
    size = RecurrentBytes(state, row)
    assert size.steady(ReplayConfig(window=window)) / 1024 == pytest.approx(kibibytes, abs=0.01)
    assert size.standard() == 2 * state


@pytest.mark.parametrize(("tokens", "accepted", "folds"), [(2, 1, 1 / 15), (4, 3, 0.2), (4, 4, 0.25), (8, 8, 0.5)])
def test_steady_verify_traffic_folds_as_often_as_the_window_asks(tokens: int, accepted: int, folds: float) -> None:
    """With rings of no size, what is left is one read and ``folds`` writes of the state a step."""
    replay = ReplayConfig(max_draft_len=tokens - 1)
    assert RecurrentBytes(1000, 0).steady(replay, tokens, accepted) == pytest.approx(1000 * (1 + folds), rel=1e-3)


def test_step_bytes_counts_padding_rows_as_nothing() -> None:
    step = torch.tensor([[0, 20, 16, 16, 4, 0, 0, 0], [-1, 20, 16, 20, 4, 0, 0, 0]])
    assert RecurrentBytes(1000, 10).moved(step) == 1000 + (4 + 4) * 10


def test_checkpoint_and_engine_say_what_they_were_made_with(config_file: Any) -> None:
    subject = tiny(ReplayConfig(window=8, max_draft_len=2))
    checkpoint = CheckpointConfig("Test", "bfloat16", 1, subject.decoder, subject.replay)
    read = read_subject(config_file(checkpoint.to_dict()))
    assert (read.source, read.decoder, read.replay) == ("checkpoint", subject.decoder, subject.replay)
    engine = EngineConfig(checkpoint, max_batch_size=2, max_seq_len=77, max_num_tokens=64)
    read = read_subject(config_file(engine.to_dict()))
    assert (read.source, read.max_seq_len) == ("engine", 77)


def test_unknown_paths_and_models_are_refused(tmp_path: Path, config_file: Any) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_subject(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match="JambaForCausalLM"):
        read_subject(config_file({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}))


def test_command_prints_tables_and_json(config_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(config_file(PUBLISHED["Nemotron 3 Nano 30B-A3B"]))
    assert main(["inspect", path, "--max_draft_len", "3"]) == 0
    text = capsys.readouterr().out
    for expected in ("31.6 B, 3.58 B per token", "23 x mamba2", "46.0 MiB", "verify, 4 tokens, 4 accepted"):
        assert expected in text
    assert main(["inspect", path, "--json", "--tp_size", "2", "--state_dtype", "bfloat16", "--replay_window", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["request"]["state_bytes"] == 46 * MIB // 4
    assert report["replay"]["window"] == 8
    assert report["layers"][0]["kind"] == "mamba2"
