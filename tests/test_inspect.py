"""inspect: sizes of released models, what it says of folders, and the bytes that its model of a step predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from hf_spelling import write_hub
from safetensors import safe_open

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.demo.models import make_checkpoint
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError, UserError
from trtllm_replayssm.inspection import Subject, inspect_model
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
from trtllm_replayssm.subject import read_subject
from trtllm_replayssm.traffic import RecurrentBytes

MIB = 2**20
CONFIGS = Path(__file__).parent / "data" / "configs"
#: Of released models: MiB of float32 state of a recurrent layer and of all; parameters without MTP in billions, of all and
#: of one token, which are the figures that the models are named for.
EXPECTED = {
    "bamba_9b": (4, 116, 9.78, 9.78),
    "codestral_mamba_7b": (4, 256, 7.29, 7.29),
    "falcon_h1_0_5b": (0.75, 27, 0.521, 0.521),
    "glm_5_3_flash": (4, 136, 313.3, 17.4),
    "granite_4_h_small": (4, 144, 32.2, 8.80),
    "kimi_k3": (6, 414, 2779, 105.3),
    "kimi_linear_48b_a3b": (2, 40, 49.1, 3.48),
    "nemotron_3_nano_30b_a3b": (2, 46, 31.6, 3.58),
    "nemotron_3_super_120b_a12b": (4, 160, 120.7, 12.8),
    "nemotron_nano_v2_9b": (5, 135, 8.89, 8.89),
    "qwen3_5_27b": (3, 144, 26.9, 26.9),
    "qwen3_5_35b_a3b": (2, 60, 34.7, 3.45),
    "qwen3_5_397b_a17b": (4, 180, 396.3, 17.3),
    "qwen3_next_80b_a3b": (2, 72, 79.7, 3.87),
    # Of the 51.2 in tables of n-grams, a token reads 16 rows.
    "qwen3_8_flash_next": (3, 108, 176.9, 7.31),
    "ling_3_flash": (2, 70, 124.4, 5.5),
    "ling_3_tiny": (1, 18, 7.89, 1.38),
    "mamba2_2_7b": (2.5, 160, 2.70, 2.70),
    # 30 heads of 96 x 192.
    "olmo_hybrid_7b": (30 * 96 * 192 * 4 / MIB, 50.625, 7.43, 7.43),
}


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    def write(values: dict[str, Any], name: str = "config.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_published_model_from_bare_config(name: str) -> None:
    report = inspect_model(read_subject(CONFIGS / f"{name}.json"))
    per_layer, total, billions, active = EXPECTED[name]
    assert {g.state_bytes_per_layer for g in report.layers if g.state_bytes} == {per_layer * MIB}
    assert report.total("state_bytes") == total * MIB
    assert (report.parameters - report.mtp_parameters) / 1e9 == pytest.approx(billions, rel=5e-3)
    assert report.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_caches_of_attention_over_blocks_grow_by_a_part_of_a_row_a_token() -> None:
    """GLM-5.3: a latent of 512 channels, and a key of 128 for four tokens, in 16 bits and 11 layers."""
    report = inspect_model(read_subject(CONFIGS / "glm_5_3_flash.json"))
    assert report.total("kv_bytes_per_token") == 11 * 2 * (512 + 128 // 4)
    (attention,) = (group for group in report.layers if group.kind == "mla")
    assert "top 512 of blocks of 4" in attention.shape


def test_config_of_the_state_spaces_package_names_no_architecture() -> None:
    assert read_subject(CONFIGS / "mamba2_2_7b.json").architecture == "MambaLMHeadModel"


def test_a_member_of_a_hybrid_family_without_recurrent_layers(
    config_file: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Some Granite 4 checkpoints of the hybrid class are attention alone, with RoPE."""
    values = json.loads((CONFIGS / "granite_4_h_small.json").read_text())
    values |= {"layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    report = inspect_model(read_subject(config_file(values)))
    assert "no recurrent layer" in caplog.text
    assert report.kinds() == {"attention": 40, "moe": 40}
    assert (report.total("state_bytes"), report.total("ring_bytes"), report.steps) == (0, 0, ())


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


def test_bytes_of_read_copies_by_hand() -> None:
    for read_dtype, head_bytes in (("fp8", 16 * (32 + 1)), ("nvfp4", 16 * (16 + 2) + 4)):
        report = inspect_model(tiny(ReplayConfig(state_read_dtype=read_dtype)))
        mamba, plain = report.layers[0], inspect_model(tiny()).layers[0]
        assert mamba.copy_bytes == 2 * 8 * head_bytes
        assert report.request_bytes == inspect_model(tiny()).request_bytes + mamba.copy_bytes
        assert (mamba.state_bytes, mamba.ring_bytes) == (plain.state_bytes, plain.ring_bytes)
        assert plain.copy_bytes == 0


def test_tensor_parallel_rank_holds_its_share() -> None:
    whole, half = inspect_model(tiny()), inspect_model(tiny(tp_size=2))
    assert half.total("state_bytes") * 2 == whole.total("state_bytes")
    assert half.parameters == whole.parameters
    assert half.weight_bytes < whole.weight_bytes
    with pytest.raises(UserError, match="cannot be divided over tp_size 3"):
        inspect_model(tiny(tp_size=3))
    with pytest.raises(UserError, match="tp_size is 0; it must be 1 or more"):
        inspect_model(tiny(tp_size=0))


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


@pytest.mark.parametrize(("tokens", "accepted", "folds"), [(1, 1, 1 / 16), (4, 3, 0.2)])
def test_steady_traffic_with_a_read_copy(tokens: int, accepted: int, folds: float) -> None:
    """Every step reads the copy; one that folds reads the checkpoint as well, and writes both."""
    replay = ReplayConfig(max_draft_len=tokens - 1)
    expected = 140 + folds * (1000 + 1000 + 140)
    assert RecurrentBytes(1000, 0, 140).steady(replay, tokens, accepted) == pytest.approx(expected, rel=1e-3)


def test_step_bytes_counts_padding_rows_as_nothing() -> None:
    step = torch.tensor([[0, 20, 16, 16, 4, 0, 0, 0], [-1, 20, 16, 20, 4, 0, 0, 0]])
    assert RecurrentBytes(1000, 10).moved(step) == 1000 + (4 + 4) * 10


def test_checkpoint_and_engine_say_what_they_were_made_with(config_file: Any) -> None:
    subject = tiny(ReplayConfig(window=8, max_draft_len=2))
    checkpoint = CheckpointConfig("Test", "bfloat16", 1, subject.decoder, subject.replay)
    read = read_subject(config_file(checkpoint.to_dict()))
    assert (read.source, read.decoder, read.replay) == ("checkpoint", subject.decoder, subject.replay)
    engine = EngineConfig(checkpoint, max_batch_size=2, max_seq_len=77, max_num_tokens=64, rank_bytes=(1,))
    read = read_subject(config_file(engine.to_dict()))
    assert (read.source, read.max_seq_len) == ("engine", 77)


def test_report_of_an_engine_is_what_lies_on_disk_and_in_the_pools(tmp_path: Path) -> None:
    make_checkpoint("nemotron_h", tmp_path / "model")
    replay = ReplayConfig(window=8, max_draft_len=3, state_read_dtype="nvfp4")
    convert(tmp_path / "model", tmp_path / "checkpoint", dtype="bfloat16", tp_size=2, replay=replay)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", BuildOptions(max_seq_len=64))
    report = inspect_model(read_subject(tmp_path / "engine"))
    with safe_open(tmp_path / "engine" / "rank1.engine", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118  (not a dict)
    assert report.weight_bytes == sum(tensor.nbytes for tensor in tensors)
    pools = EngineConfig.read(tmp_path / "engine").pools().values()
    for kind in ("state", "copy", "ring", "conv"):
        size, allocated = f"{kind}_bytes", [pool.allocate(1) for pool in pools if pool.kind == kind]
        assert allocated
        assert report.total(size) == sum(tensor.numel() * tensor.itemsize for tensor in allocated)
    source = inspect_model(read_subject(tmp_path / "model"))
    assert source.subject.source == "Hugging Face checkpoint"
    assert source.parameters == report.parameters


def test_rank_files_that_are_not_whole_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("nemotron_h", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", BuildOptions(max_seq_len=64))
    for folder, name in (("checkpoint", "rank0.safetensors"), ("engine", "rank0.engine")):
        path = tmp_path / folder / name
        whole = path.read_bytes()
        assert main(["inspect", str(tmp_path / folder)]) == 0
        for damage in (whole[:-1], whole[:100]):
            path.write_bytes(damage)
            assert main(["inspect", str(tmp_path / folder)]) == 1
            assert str(path) in capsys.readouterr().err
        path.unlink()
        assert main(["inspect", str(tmp_path / folder)]) == 1
        assert name in capsys.readouterr().err


def test_a_folder_whose_config_names_no_dtype_is_reported_as_it_would_be_converted(tmp_path: Path) -> None:
    folder = write_hub(build("state_spaces"), tmp_path / "hub")
    config = convert(folder, tmp_path / "checkpoint")
    assert read_subject(folder).dtype == config.dtype == "float32"


def test_unknown_paths_and_models_are_refused(tmp_path: Path, config_file: Any) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_subject(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match="JambaForCausalLM"):
        read_subject(config_file({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}))


@pytest.mark.parametrize("length", ["0", "-5"])
def test_a_length_that_no_request_has(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(CONFIGS / "nemotron_3_nano_30b_a3b.json"), "--max_seq_len", length]) == 1
    assert f"error: --max_seq_len is {length}; it must be 1 or more" in capsys.readouterr().err


def test_command_prints_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "nemotron_3_nano_30b_a3b.json")
    assert main(["inspect", path, "--max_draft_len", "3"]) == 0
    text = capsys.readouterr().out
    for expected in ("31.6 B, 3.58 B active per token", "23 x mamba2", "46.0 MiB", "verify, 4 tokens, 4 accepted"):
        assert expected in text
    assert "read copy" not in text
    assert main(["inspect", path, "--state_read_dtype", "nvfp4"]) == 0
    text = capsys.readouterr().out
    # 4.5 bits an element besides, and a scale a head.
    assert "state float32, read as nvfp4" in text
    assert "6.47 MiB" in text
    assert main(["inspect", path, "--state_dtype", "float16", "--state_rounding", "stochastic"]) == 0
    assert "state float16 rounded stochastically, read as same" in capsys.readouterr().out
    assert main(["inspect", path, "--json", "--tp_size", "2", "--state_dtype", "bfloat16", "--replay_window", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["request"]["state_bytes"] == 46 * MIB // 4
    assert report["replay"]["window"] == 8
    assert report["layers"][0]["kind"] == "mamba2"
