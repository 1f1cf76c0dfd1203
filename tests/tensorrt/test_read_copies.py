"""Read copies in TensorRT's networks and sessions: pools of raw bits beside the state, renewed in place by the same layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from emission import REPLAY, Emission, Run
from engine_pair import Pair, Sessions, tokens

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.tensorrt.build import StepSizes
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.plugins.read_copy import copy_names

#: States 32 wide, a block of fp8.
LAYERS: dict[str, Layer] = {
    "mamba2": Mamba2(8, 16, 32, 2, 4, 1e-5),
    "gated_delta": GatedDelta(2, 4, 32, 16, 4, 1e-6),
    "kda": Kda(2, 32, 4, 1e-6),
}
#: Backends differ by what float32 rounds, which may move a code to its neighbour, and the output by a fraction of it.
MOVED, TOLERANCE = 1e-3, {"atol": 2e-3, "rtol": 1e-3}
SIZES = StepSizes(max_batch_size=4, verify_tokens=4, prefill_tokens=64)

both_formats = pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])


def model(*layers: Layer) -> HybridDecoder:
    return HybridDecoder(51, 64, 1e-5, (*layers, Attention(4, 2, 16, 0.25)))


@both_formats
@pytest.mark.parametrize("kind", LAYERS)
def test_networks_read_and_renew_copies(kind: str, read_dtype: str) -> None:
    """A prefill, then verify steps that fold and reject; TensorRT builds the network with its int8 pools."""
    emission = Emission.of(model(LAYERS[kind]), replay=replace(REPLAY, state_read_dtype=read_dtype))
    copies = [f"transformer.layers.0.{kind}.{name}" for name in copy_names(read_dtype)]
    assert set(copies) <= set(emission.step.emitter.inputs)
    run, done = Run(emission, 2), 0
    ids = tokens(2, 60, 0)
    for count, accepted in ((20, 20), (4, 2), (4, 4), (4, 1), (1, 1), (4, 3), (4, 4)):
        mode = RowMode.ABSORB if done == 0 else RowMode.DECODE
        expected, got = run.compare(ids[:, done : done + count], mode, accepted)
        torch.testing.assert_close(got, expected, **TOLERANCE)
        done += accepted
    for name in copies:
        mine, theirs = run.mine[name], run.theirs[name]
        assert mine.any()
        if mine.dtype == torch.int8:
            assert (mine != theirs).double().mean() < MOVED, name
        else:
            torch.testing.assert_close(theirs, mine, atol=0, rtol=1e-4)
    assert len(emission.plan(SIZES)) > 0


@both_formats
def test_sessions_equal_the_embedded_engine(read_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in short pieces, drafts, a slot that is saved and put elsewhere, and a materialised prefix."""
    pair = Pair(tmp_path, model(*LAYERS.values()), state_read_dtype=read_dtype)
    sessions = Sessions(pair, monkeypatch, snapshot_slots=1)

    def both(call: str, *args: object) -> None:
        expected, got = sessions.each(call, *args)
        if expected is not None:
            torch.testing.assert_close(got, expected, **TOLERANCE)
        assert torch.equal(sessions.theirs.cursors, sessions.theirs.host)

    for slot, length in enumerate((21, 5, 30)):
        both("prefill", slot, tokens(1, length, slot)[0], 9)
    for seed, (count, accepted) in enumerate(((1, 1), (4, 2), (4, 1), (4, 4), (3, 0), (4, 3), (1, 1)) * 2):
        both("step", tokens(3, count, 10 + seed))
        both("commit", 0, [accepted] * 3)
    both("materialise", 0, 4, sessions.mine.committed()[0])
    for session in sessions.both:
        session.restore(3, session.save(4))
        session.restore(1, session.save(2))
    both("step", tokens(4, 4, 40))
    assert sessions.mine.rewrites == sessions.theirs.rewrites > 6
