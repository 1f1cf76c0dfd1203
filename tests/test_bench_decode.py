"""Decode timings: what is counted, that it fits, and the plots made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch
from scheduling import MODEL, OPTIONS

from trtllm_replayssm.bench.decode import WARM_STEPS, decode_timing, decode_timings, modes, with_replay
from trtllm_replayssm.bench.plots import plot_shares, plot_throughput
from trtllm_replayssm.bench.profile import Kernel, KernelTime, account, longest, part_of, step_profiles
from trtllm_replayssm.bench.report import weights_bytes
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.packed import PackedWeight, Packing
from trtllm_replayssm.plugins.cursors import Cursor
from trtllm_replayssm.plugins.report import released_kernels
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.session import Session

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("bench_decode") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, replace(OPTIONS, max_seq_len=160), text=True))


def test_the_modes_are_one_model(engine: Engine) -> None:
    standard, replayssm, speculative = modes(ReplayConfig(window=8, state_dtype="bfloat16"))
    assert [m.replay.window for m in (standard, replayssm, speculative)] == [1, 8, 8]
    assert [m.replay.max_draft_len for m in (standard, replayssm, speculative)] == [0, 0, 3]
    assert {m.replay.state_dtype for m in (standard, replayssm, speculative)} == {"bfloat16"}
    assert modes(ReplayConfig(window=1))[1].replay.window == 16
    assert [m.replay.state_read_dtype for m in modes(ReplayConfig(state_read_dtype="fp8"))] == ["same", "fp8", "fp8"]
    ids = torch.tensor([[5, 6, 7]])
    logits = []
    for mode in modes(engine.config.replay):
        session = Session(with_replay(engine, mode.replay, 2, mode.tokens))
        session.admit(0)
        session.prefill(0, [2, 3, 4])
        rows = [session.step(ids[:, [i]]) for i in range(3) if not i or session.commit(0, [1]) is None]
        logits.append(torch.cat(rows, 1)[0])
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
    assert torch.allclose(logits[0], logits[2], atol=1e-4)
    with pytest.raises(UserError, match="cannot keep 5 tokens"):
        modes(ReplayConfig(), draft_len=3, accepted=5)


def test_steps_cover_whole_windows_and_tokens_are_counted(engine: Engine) -> None:
    mode = modes(engine.config.replay)[1]
    session = Session(with_replay(engine, mode.replay, 3, 1))
    timing = decode_timing(session, mode, context_len=10, steps=7)
    assert timing.steps == 12 == timing.step_ms.count
    # The run takes its steps and what lies behind the last of them.
    assert 0 < timing.tokens_per_second <= 3 * 1e3 / timing.step_ms.average * (1 + 1e-9)
    # Slots began at different places of their window.
    assert session.committed() == [10 + waiting + WARM_STEPS + 12 for waiting in range(3)]
    folded = session.host[:, Cursor.FOLDED].tolist()
    assert [held - fold for held, fold in zip(session.committed(), folded)] == [3, 4, 5]


def test_every_mode_at_every_size(engine: Engine, tmp_path: Path) -> None:
    timings = list(decode_timings(engine, [1, 3], 12, modes(engine.config.replay), steps=6))
    assert [(t.batch_size, t.mode) for t in timings] == [
        (size, mode) for size in (1, 3) for mode in ("standard", "replayssm", "speculative")
    ]
    assert all(t.tokens_per_second > 0 for t in timings)
    assert timings[0].slot_bytes < timings[1].slot_bytes < timings[2].slot_bytes
    plot_throughput(tmp_path / "throughput.png", timings, "a CPU")
    assert (tmp_path / "throughput.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["throughput.png"]


def test_sizes_that_make_no_sense_are_refused(engine: Engine) -> None:
    chosen = modes(engine.config.replay)
    with pytest.raises(UserError, match="batch_sizes is 0"):
        list(decode_timings(engine, [4, 0], 12, chosen))
    with pytest.raises(UserError, match="max_seq_len is 160"):
        list(decode_timings(engine, [1], 150, chosen))


def test_plans_are_what_they_were_built_for(engine: Engine) -> None:
    plan = replace(engine, config=replace(engine.config, engine_flavour="tensorrt", rank_bytes=(123,)))
    assert weights_bytes(plan) == 123
    assert weights_bytes(engine) == sum(weight.nbytes for weight in engine.weights.values())
    with pytest.raises(UserError, match="one window and one batch size"):
        list(decode_timings(plan, [1], 12, modes(engine.config.replay)))


def test_quantised_weights_count_as_they_are_stored(engine: Engine) -> None:
    packing = Packing("NVFP4", 16)
    parts = tuple(torch.zeros(shape, dtype=dtype) for dtype, shape in packing.layout("w", (8, 32)).values())
    kept = replace(engine, weights={"w": PackedWeight(packing, parts, torch.float32)})
    assert weights_bytes(kept) == 8 * 32 // 2 + 8 * 2 + 8 * 4


def test_shares_are_drawn(tmp_path: Path) -> None:
    plot_shares(
        tmp_path / "shares.png", {1024: {"ssm": 0.6, "attention": 0.4}, 4096: {"ssm": 0.2, "attention": 0.8}}, "t"
    )
    assert (tmp_path / "shares.png").read_bytes().startswith(PNG)


def test_kernels_belong_to_parts() -> None:
    names = {
        "mamba2_step": "recurrence",
        "causal_conv": "recurrence",
        "decode_attention": "attention",
        "void pytorch_flash::flash_fwd_splitkv_kernel": "attention",
        "grouped_linear": "experts",
        "row_linear": "linear",
        "nvjet_tst_64x8_64x16_2x1_v_bz_TNT": "linear",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>": "linear",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
        "void at::native::elementwise_kernel": "other",
    }
    assert {name: part_of(name) for name in names} == names


def test_every_kernel_of_a_recurrent_layer_counts_as_recurrence() -> None:
    """Also those that a launch record alone names, as it does for windows of 1."""
    symbols = {kernel.symbol for kernel in released_kernels()}
    assert {"delta_standard", "mamba2_standard", "mamba2_copy_step"} < symbols
    assert {part_of(symbol) for symbol in symbols if symbol.startswith(("mamba2", "delta", "gated", "kda"))} == {
        "recurrence"
    }


def test_time_is_counted_once_and_gaps_are_what_is_left() -> None:
    kernels = [
        Kernel("kda", 10, 14),
        Kernel("gemm", 12, 20),  # 4 to 6 of it beside the one before
        Kernel("copy", 13, 15),  # hidden behind both
        Kernel("rms_norm", 23, 24),
    ]
    found = account(reversed(kernels))
    assert found["recurrence"] == 4
    assert found["linear"] == 6
    assert found["other"] == 1
    assert found["gaps"] == 3
    assert sum(found.values()) == 14
    assert sum(account([]).values()) == 0


def test_the_longest_kernels_are_named() -> None:
    kernels = [Kernel("kda", 0, 1000), Kernel("gemm", 0, 3000), Kernel("kda", 5000, 6500)]
    assert longest(kernels, steps=2) == (KernelTime("gemm", 1.5, 0.5), KernelTime("kda", 1.25, 1.0))
    assert len(longest([Kernel(str(i), 0, 1) for i in range(99)], 1)) == 25


def test_profiles_need_a_gpu(engine: Engine) -> None:
    with pytest.raises(UserError, match="told apart by their kernels"):
        list(step_profiles(engine, modes(engine.config.replay)[1], 2, [10]))


def test_command_compares_modes_and_draws(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, plots = tmp_path / "report.json", tmp_path / "plots"
    words = [
        "bench",
        "--engine_dir",
        str(engine.folder),
        "--decode_batch_sizes",
        "1",
        "2",
        "--context_len",
        "9",
        "--steps",
        "6",
    ]
    assert main([*words, "--report_json", str(report), "--plot_dir", str(plots)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("standard", "replayssm", "speculative", "tokens/s"))
    data = json.loads(report.read_text())
    assert [t["batch_size"] for t in data["decode_timings"]] == [1, 1, 1, 2, 2, 2]
    assert data["step_profiles"] == []
    assert (plots / "decode_throughput.png").read_bytes().startswith(PNG)
    assert main([*words, "--accepted", "7"]) == 1
    assert "cannot keep 7 tokens" in capsys.readouterr().err
    assert main([*words[:3], "--profile_context_lens", "9"]) == 1
    assert "on a machine with a GPU" in capsys.readouterr().err
