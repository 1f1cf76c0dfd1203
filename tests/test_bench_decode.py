"""Decode timings: what is counted, that it fits, and the plots made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch
from test_scheduler import MODEL, OPTIONS

from trtllm_replayssm.bench.decode import WARM_STEPS, decode_timing, decode_timings, modes, with_replay
from trtllm_replayssm.bench.plots import plot_shares, plot_throughput
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import Cursor
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
    assert timing.tokens_per_second == pytest.approx(3 * 1e3 / timing.step_ms.average, rel=0.05)
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


def test_shares_are_drawn(tmp_path: Path) -> None:
    plot_shares(
        tmp_path / "shares.png", {1024: {"ssm": 0.6, "attention": 0.4}, 4096: {"ssm": 0.2, "attention": 0.8}}, "t"
    )
    assert (tmp_path / "shares.png").read_bytes().startswith(PNG)
