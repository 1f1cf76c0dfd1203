"""An embedded engine and one of TensorRT, of one checkpoint, and sessions of both that get the same calls."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from stand_in import StandIn
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.plugins.implementation import reference
from trtllm_replayssm.runtime.build import build_engine, engine_config
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tensorrt import engine as loading
from trtllm_replayssm.runtime.tensorrt.plans import Target

CAPABILITY = (9, 0)
LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 125, "max_num_tokens": 256}
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def options(flavour: str, **changes: Any) -> BuildOptions:
    return BuildOptions(engine_flavour=flavour, **LIMITS | {"max_draft_len": 3} | changes)


class Pair:
    """An embedded engine and one of TensorRT, of one checkpoint."""

    def __init__(
        self,
        folder: Path,
        model: Any = None,
        features: dict[str, bool] | None = None,
        tp_size: int = 1,
        **changes: Any,
    ) -> None:
        self.source = synthetic.write_checkpoint(folder / "checkpoint", model or synthetic.decoder(), tp_size)
        self.folder = folder / "tensorrt"
        self.options = options("tensorrt", **{"gather_context_logits": True} | changes)
        pools = engine_config(CheckpointConfig.read(self.source), self.options).pools()
        self.stand_in = StandIn(pools, **(features or {}))
        self.build()

    @cached_property
    def embedded(self) -> Engine:
        folder = self.folder.with_name("embedded")
        build_engine(self.source, folder, replace(self.options, engine_flavour="embedded"))
        return Engine.load(folder, device="cpu")

    def build(self) -> None:
        tensorrt = self.stand_in.tensorrt()

        def network() -> tuple[Any, Any]:
            builder = tensorrt.builder(tensorrt_log(tensorrt.module))
            return tensorrt.create_network(builder), builder

        target = Target(tensorrt, CAPABILITY, self.stand_in.plugins, network)
        build_engine(self.source, self.folder, self.options, target=target)

    def load(self, monkeypatch: pytest.MonkeyPatch, rank: int | None = None) -> Any:
        """As on a machine with this TensorRT and GPU. rank: this one, in this process."""
        monkeypatch.setattr(loading, "load_tensorrt", lambda flavours: self.stand_in.tensorrt())
        monkeypatch.setattr(loading, "found_capability", lambda folder, device: CAPABILITY)
        if rank is None:
            return Engine.load(self.folder, device="cpu")
        config = EngineConfig.read(self.folder)
        assert config.tensorrt is not None
        here = torch.device("cpu"), None, reference()
        return loading.load_plans(self.folder, config, config.tensorrt, rank, *here)


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

    def step(
        self, ids: Tensor, first: int = 0, lengths: list[int] | None = None, modes: Any = None, active: Any = None
    ) -> None:
        """All valid tokens of active rows."""
        expected, got = self.each("step", ids, first, lengths, modes, active)
        for row in range(len(ids)):
            end = ids.shape[1] if lengths is None else lengths[row]
            if active is None or active[row]:
                torch.testing.assert_close(got[row, :end], expected[row, :end], **TOLERANCE)
        assert torch.equal(self.theirs.cursors, self.theirs.host)

    def each(self, call: str, *args: Any) -> list[Any]:
        return [getattr(session, call)(*args) for session in self.both]


def tokens(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, synthetic.VOCAB_SIZE, (rows, count), generator=torch.Generator().manual_seed(seed))
