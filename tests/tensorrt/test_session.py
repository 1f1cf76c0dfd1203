"""Engines of the flavour tensorrt, from build to text, against embedded engines of the same checkpoint.

TensorRT is a stand-in that computes the genuine network definitions at the addresses that the session binds (stand_in.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from stand_in import StandIn
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.runtime.build import build_engine, engine_config
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tensorrt import engine as loading
from trtllm_replayssm.runtime.tensorrt.plans import Target
from trtllm_replayssm.runtime.tensorrt.steps import PlanSteps

CAPABILITY = (9, 0)
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 125, "max_num_tokens": 256}
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def options(flavour: str, **changes: Any) -> BuildOptions:
    return BuildOptions(engine_flavour=flavour, **LIMITS | {"max_draft_len": 3} | changes)


class Pair:
    """An embedded engine and one of TensorRT, of one checkpoint."""

    def __init__(
        self, folder: Path, model: Any = None, features: dict[str, bool] | None = None, **changes: Any
    ) -> None:
        source = synthetic.write_checkpoint(folder / "checkpoint", model or synthetic.decoder())
        self.folder = folder / "tensorrt"
        build_engine(source, folder / "embedded", options("embedded", **changes))
        self.config = engine_config(CheckpointConfig.read(source), options("tensorrt", **changes))
        self.stand_in = StandIn(self.config.pools(), **(features or {}))
        tensorrt = self.stand_in.tensorrt()

        def network() -> tuple[Any, Any]:
            builder = tensorrt.builder(tensorrt_log(tensorrt.module))
            return tensorrt.create_network(builder), builder

        target = Target(tensorrt, CAPABILITY, self.stand_in.plugins, network)
        gathers = {"gather_context_logits": True} | changes
        build_engine(source, self.folder, options("tensorrt", **gathers), target=target)
        self.embedded = Engine.load(folder / "embedded", device="cpu")

    def load(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        """As on a machine with this TensorRT and GPU."""
        monkeypatch.setattr(loading, "load_tensorrt", lambda flavours: self.stand_in.tensorrt())
        monkeypatch.setattr(loading, "found_capability", lambda folder, device: CAPABILITY)
        return Engine.load(self.folder, device="cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("engines"))


class Sessions:
    """The same calls on both; results are compared."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, snapshot_slots: int = 0) -> None:
        self.engine = pair.load(monkeypatch)
        self.both = [Session(engine, snapshot_slots) for engine in (pair.embedded, self.engine)]
        self.mine, self.theirs = self.both

    def same(self, call: str, *args: Any, **values: Any) -> Tensor:
        expected, got = (getattr(session, call)(*args, **values) for session in self.both)
        if expected is not None:
            torch.testing.assert_close(got, expected, **TOLERANCE)
        assert torch.equal(self.mine.host, self.theirs.host)
        # The device's cursors followed the same rule as the host's.
        assert torch.equal(self.theirs.cursors, self.theirs.host)
        return expected

    def each(self, call: str, *args: Any) -> list[Any]:
        return [getattr(session, call)(*args) for session in self.both]


def tokens(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, synthetic.VOCAB_SIZE, (rows, count), generator=torch.Generator().manual_seed(seed))


def test_prefill_decode_and_verify_equal_the_embedded_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer kind; prompts in chunks, drafts of every number, accepted in every number."""
    sessions = Sessions(pair, monkeypatch)
    assert isinstance(sessions.theirs.steps, PlanSteps)
    for slot, length in enumerate((21, 1, 9)):
        sessions.same("admit", slot)
        sessions.same("prefill", slot, tokens(1, length, slot)[0], 8)
    for seed, (count, accepted) in enumerate(
        ((1, 1), (4, 2), (4, 1), (2, 2), (3, 0), (1, 1), (4, 4), (4, 3), (1, 1)) * 2
    ):
        sessions.same("step", tokens(3, count, 10 + seed))
        sessions.same("commit", 0, [accepted] * 3)
    assert sessions.mine.rewrites == sessions.theirs.rewrites > 6
