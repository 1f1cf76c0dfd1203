"""A whole engine on the GPU, with the CUDA kernels, against the same engine on the CPU with the reference recurrences."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.plugins.cursors import Cursor, RowMode
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.plugins.reference.read_copy import quantise
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.validation.catalogue import MODELS


def run(engine: Engine, ids: torch.Tensor, draft: int) -> torch.Tensor:
    """Logits of a prefill, decode steps over two windows, and verify steps of which a part is rejected."""
    session = Session(engine)
    out = []

    def step(tokens: torch.Tensor, mode: RowMode, accepted: int) -> None:
        logits = session.step(tokens, 0, modes=[mode] * len(tokens))
        session.commit(0, [accepted] * len(tokens))
        out.append(logits[:, :accepted].float().cpu())

    step(ids[:, :37], RowMode.ABSORB, 37)
    position = 37
    for _ in range(18):
        step(ids[:, position : position + 1], RowMode.DECODE, 1)
        position += 1
    for accepted in (1, 3, 2, 4, 4, 1, 4, 3, 2):
        drafts = ids[:, position : position + draft + 1].clone()
        drafts[:, accepted:] = 7
        step(drafts, RowMode.DECODE, accepted)
        position += accepted
    return torch.cat(out, 1)


def check(folder: Path, dtype: str, decoder: HybridDecoder, allowance: float, floor: float = 0.0) -> None:
    """An engine on the GPU errs by no more than ``floor``, or than ``allowance`` times what it errs on the CPU.

    Errors are of logits, relative to their norm. In float32 the bound is 1e-4.
    """
    options = BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=1024)
    synthetic.write_engine(folder, decoder, options, dtype=dtype, replay=ReplayConfig(window=8, max_draft_len=3))
    ids = torch.randint(0, decoder.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    cpu = Engine.load(folder, device="cpu")
    want = run(synthetic.in_float32(cpu), ids, 3)

    def error(engine: Engine) -> float:
        return float((run(engine, ids, 3) - want).norm() / want.norm())

    bound = 1e-4 if dtype == "float32" else max(floor, allowance * error(cpu))
    engine = Engine.load(folder, device="cuda", plugin_impl="cuda")
    assert engine.plugins.name == "cuda"
    assert error(engine) < bound
    assert error(Engine.load(folder, device="cuda", plugin_impl="reference")) < bound


@pytest.mark.parametrize("layers", [synthetic.LAYERS, synthetic.REAL_HEADS], ids=["every-kind", "real-heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_is_as_exact_as_on_the_cpu(tmp_path, layers, dtype):
    """Roundings in 16 bits fall elsewhere on a GPU, but are no larger."""
    check(tmp_path / "engine", dtype, synthetic.decoder(layers), allowance=1.5)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_is_as_exact_as_on_the_cpu(tmp_path, family, dtype):
    """In 16 bits other experts are chosen at near ties than in float32, and on a GPU again others."""
    model = MODELS[family]
    decoder = find_family({"architectures": [model.model_class], **model.arguments}, {}).decoder()
    floor = 0.4 if any(isinstance(layer, Moe) for layer in decoder.layers) else 0.0
    check(tmp_path / "engine", dtype, decoder, 2.0, floor)


#: Sizes that the tuned kernels take, and others for the plain ones; states are multiples of fp8's blocks wide.
COPIED = {
    "real-heads": synthetic.REAL_HEADS,
    "odd-heads": (
        replace(synthetic.REAL_HEADS[0], head_dim=24, state_size=96),
        replace(synthetic.REAL_HEADS[2], key_dim=96, value_dim=40),
        replace(synthetic.REAL_HEADS[4], head_dim=96),
    ),
}


def copies_are_of_their_states(session: Session) -> None:
    """Of every slot that has a checkpoint, bit for bit."""
    held = (session.host[:, Cursor.FOLDED] > 0).nonzero()[:, 0]
    states = [name for name in session.pools if name.endswith(".state")]
    assert len(states) == 3
    assert len(held) > 0
    for name in states:
        expected = quantise(session.pools[name].cpu()[held], session.replay.state_read_dtype)
        for copy in copy_names(session.replay.state_read_dtype):
            found = session.pools[f"{name.removesuffix('state')}{copy}"].cpu()[held]
            assert torch.equal(found, expected[copy]), f"{name}, {copy}"


@pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])
@pytest.mark.parametrize("layers", COPIED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engine_with_read_copies(tmp_path, layers, dtype, read_dtype):
    """In float32 it is near the CPU beside what the copy rounds, in 16 bits no farther from the truth than the CPU is."""
    folder, replay = tmp_path / "engine", ReplayConfig(window=8, max_draft_len=3, state_read_dtype=read_dtype)
    options = BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=1024)
    synthetic.write_engine(folder, synthetic.decoder(COPIED[layers]), options, dtype=dtype, replay=replay)
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 100), generator=torch.Generator().manual_seed(1))
    cpu, gpu = Engine.load(folder, device="cpu"), Engine.load(folder, device="cuda", plugin_impl="cuda")
    exact = synthetic.in_float32(synthetic.with_replay(cpu, state_read_dtype="same"))
    want, theirs, got = (run(engine, ids, 3) for engine in (exact, cpu, gpu))
    rounding = float((theirs - want).norm())
    assert 0 < rounding < 0.1 * float(want.norm())
    if dtype == "float32":
        assert float((got - theirs).norm()) < 0.2 * rounding
    else:
        assert float((got - want).norm()) < 1.5 * rounding
    session = Session(gpu, snapshot_slots=1)
    session.prefill(0, ids[0, :30])
    for token in ids[0, 30:36]:
        session.step(token[None, None])
        session.commit(0, [1])
    assert session.host[0, Cursor.FOLDED] < 36
    session.materialise(0, 2, 36)
    copies_are_of_their_states(session)
