"""What narrow copies cost on a GPU: outputs the rounding that their format has, and checkpoints nothing."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from benchmarks.read_copy_error import DTYPES, layers
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.plugins.implementation import cuda
from trtllm_replayssm.plugins.reference.read_copy import quantise
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.tuning.drift import Request, weak_weights
from trtllm_replayssm.tuning.layer import signature

KINDS = {
    "mamba2": Mamba2(8, 64, 128, 2, 4, 1e-5),
    "gated_delta": GatedDelta(2, 4, 128, 128, 4, 1e-6),
    "kda": Kda(2, 128, 4, 1e-6),
}
TOKENS, PROMPT, DRAFTS, SNAPSHOT = 8192, 300, 4, 2

both_formats = pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_outputs_are_those_of_one_rounding_and_do_not_grow(kind: str, step: int) -> None:
    """About 2e-2 and 8e-2 with slow decays; less with Mamba-2, whose SiLU leaves values of one sign mostly."""
    replay, device = ReplayConfig(max_draft_len=step - 1), torch.device("cuda")
    layer = next(layer for layer in layers(replay) if signature(layer).kind == kind)
    request = Request(layer, weak_weights(layer), torch.float32, 2048, step, 1, device)
    drifts = {read: request.drift(replace(layer, read_dtype=read), DTYPES, cuda()) for read in ("same", "fp8", "nvfp4")}
    share = 0.25 if kind == "mamba2" else 0.7
    for read, error in (("fp8", 2e-2), ("nvfp4", 8e-2)):
        drift = drifts[read]
        assert share * error < drift.first < 1.15 * error
        assert drift.last < 1.15 * drift.first
        assert drift.state == drifts["same"].state < 3e-5


class Wanderer:
    """A request of 8,192 tokens: drafts are rejected, it is preempted, resumed elsewhere, and continued from a prefix."""

    def __init__(self, engine: Engine, read_dtype: str) -> None:
        self.session = Session(synthetic.with_replay(engine, state_read_dtype=read_dtype), snapshot_slots=1)
        self.slot, self.moves = 0, 0
        random_ids = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, synthetic.VOCAB_SIZE, (TOKENS + DRAFTS + 1,), generator=random_ids)

    def run(self) -> torch.Tensor:
        """The logits of all decoded tokens."""
        made, choose, logits = self.session, random.Random(1), []
        made.prefill(self.slot, self.ids[:PROMPT])
        while (done := made.committed()[self.slot]) < TOKENS:
            tokens = min(choose.choice((1, 1 + DRAFTS, 1 + DRAFTS)), TOKENS - done)
            kept = choose.randint(1, tokens)
            given = self.ids[done : done + tokens].clone()
            given[kept:] = (given[kept:] + 1) % synthetic.VOCAB_SIZE
            logits.append(made.step(given[None], self.slot)[0, :kept])
            made.commit(self.slot, [kept])
            if choose.random() < 0.01:
                self.move(choose.random() < 0.5, seed=done)
        return torch.cat(logits)

    def move(self, through_prefix: bool, seed: int) -> None:
        """Into the other slot; another request takes the old one."""
        made, old = self.session, self.slot
        if through_prefix:
            made.materialise(old, SNAPSHOT, made.committed()[old])
        saved = made.save(SNAPSHOT if through_prefix else old)
        made.admit(old)
        made.prefill(old, torch.randint(0, synthetic.VOCAB_SIZE, (7,), generator=torch.Generator().manual_seed(seed)))
        self.slot, self.moves = 1 - old, self.moves + 1
        made.restore(self.slot, saved)


@both_formats
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_long_requests_are_those_without_a_copy(tmp_path: Path, kind: str, read_dtype: str) -> None:
    """Bit for bit, in the first layer, which sees the same inputs whatever reads; the copy is that of its checkpoint."""
    replay = ReplayConfig(window=16, max_draft_len=DRAFTS)
    options = BuildOptions(max_batch_size=2, max_seq_len=TOKENS, max_num_tokens=1024)
    model = synthetic.decoder((KINDS[kind], Mlp(96, "relu2")))
    synthetic.write_engine(tmp_path / "engine", model, options, dtype="bfloat16", replay=replay)
    engine = Engine.load(tmp_path / "engine", device="cuda", plugin_impl="cuda")
    plain, copied = Wanderer(engine, "same"), Wanderer(engine, read_dtype)
    exact, read = plain.run(), copied.run()
    assert not torch.equal(exact, read)
    assert plain.moves == copied.moves > 10 and plain.slot == copied.slot
    assert plain.session.rewrites == copied.session.rewrites > TOKENS // 16
    layer = f"transformer.layers.0.{kind}."
    for name in (name for name in plain.session.pools if name.startswith(layer)):
        ours, theirs = (made.session.pools[name][made.slot].cpu() for made in (copied, plain))
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), name
    pools = {name.removeprefix(layer): pool for name, pool in copied.session.pools.items() if name.startswith(layer)}
    stored = quantise(pools["state"][[copied.slot]].cpu(), read_dtype)
    for name, value in stored.items():
        assert torch.equal(pools[name][[copied.slot]].cpu(), value), name
