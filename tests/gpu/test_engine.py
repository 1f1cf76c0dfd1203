"""A whole engine on the GPU, with the CUDA kernels, against the same engine on the CPU with the reference recurrences."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session


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


@pytest.mark.parametrize("layers", [synthetic.LAYERS, synthetic.REAL_HEADS], ids=["every-kind", "real-heads"])
@pytest.mark.parametrize(("dtype", "state", "bound"), [("float32", "float32", 1e-4), ("bfloat16", "float32", 3e-2)])
def test_engine_agrees_with_the_cpu(tmp_path, layers, dtype, state, bound):
    replay = ReplayConfig(window=8, max_draft_len=3, state_dtype=state)
    folder = synthetic.write_engine(
        tmp_path / "engine",
        synthetic.decoder(layers),
        BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=1024),
        dtype=dtype,
        replay=replay,
    )
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 100), generator=torch.Generator().manual_seed(1))
    want = run(Engine.load(folder, device="cpu"), ids, 3)
    engine = Engine.load(folder, device="cuda", plugin_impl="cuda")
    assert engine.plugins.name == "cuda"
    got = run(engine, ids, 3)
    error = float((got - want).norm() / want.norm())
    assert error < bound
    reference = run(Engine.load(folder, device="cuda", plugin_impl="reference"), ids, 3)
    assert float((got - reference).norm() / want.norm()) < bound
