"""Every family against transformers, in float32: Hugging Face folder -> checkpoint -> engine -> session -> logits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hf_models import MODELS, build, random_ids, reference_logits
from hf_spelling import write_hub, write_saved
from synthetic import spoiled, with_replay
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import load_rank
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.session import Session

#: Largest difference for logits with a standard deviation of 1; tied heads have a larger one.
TOLERANCE = 1e-4
PROMPT, DECODED = 9, 64
ROWS = 3


@dataclass(frozen=True)
class Case:
    """One tiny model: token ids ``[ROWS, PROMPT + DECODED]``, transformers' logits for them, and its engine."""

    ids: Tensor
    logits: Tensor
    engine: Engine
    folder: TemporaryDirectory[str]

    @property
    def tolerance(self) -> float:
        return TOLERANCE * max(1.0, float(self.logits.std()))

    def session(self, **replay: int | str) -> Session:
        return spoiled_session(with_replay(self.engine, **replay))

    def check(self, logits: Tensor, row: int | slice, start: int) -> None:
        expected = self.logits[row, start : start + logits.shape[-2]]
        error = float((logits - expected).abs().max())
        assert error < self.tolerance, f"logits differ by {error:.1e} from position {start}"


def spoiled_session(engine: Engine) -> Session:
    """A session whose pools hold NaN, so that nothing stale can pass for a zero."""
    session = Session(engine)
    for pool in session.pools.values():
        spoiled(pool)
    return session


@cache
def case(name: str) -> Case:
    """Built once a process, from the hub's spelling in two shards, with MTP tensors."""
    model, ids = build(name), random_ids(ROWS, PROMPT + DECODED)
    folder = TemporaryDirectory()
    root = Path(folder.name)
    convert(write_hub(model, root / "hf"), root / "checkpoint", warn=lambda message: None)
    options = BuildOptions(max_batch_size=ROWS, max_seq_len=PROMPT + DECODED, max_num_tokens=1024)
    build_engine(root / "checkpoint", root / "engine", options)
    return Case(ids, reference_logits(model, ids), Engine.load(root / "engine", device="cpu"), folder)


every_model = pytest.mark.parametrize("name", MODELS)


def absorb(session: Session, ids: Tensor, first_slot: int = 0) -> Tensor:
    """Prefill of equal lengths in one step: logits ``[rows, T, vocab]``."""
    rows, tokens = ids.shape
    logits = session.step(ids, first_slot, modes=[RowMode.ABSORB] * rows)
    session.commit(first_slot, [tokens] * rows)
    return logits


def decode(session: Session, ids: Tensor) -> Tensor:
    """One token at a time for all slots."""
    pieces = []
    for token in ids.split(1, 1):
        pieces.append(session.step(token))
        session.commit(0, [1] * len(ids))
    return torch.cat(pieces, 1)


@every_model
def test_prefill_in_one_step(name: str) -> None:
    c = case(name)
    c.check(absorb(c.session(), c.ids), slice(None), 0)


@every_model
@pytest.mark.parametrize("length", [1, 2])
def test_shortest_prefills_then_decode(name: str, length: int) -> None:
    c, session = case(name), case(name).session(window=4)
    c.check(absorb(session, c.ids[:, :length]), slice(None), 0)
    c.check(decode(session, c.ids[:, length : length + 6]), slice(None), length)


@every_model
def test_prefill_in_chunks_of_odd_sizes(name: str) -> None:
    c, session = case(name), case(name).session()
    start = 0
    for size in (5, 1, 7, 17, 3, 19):
        c.check(absorb(session, c.ids[:, start : start + size]), slice(None), start)
        start += size


@every_model
@pytest.mark.parametrize("window", [4, 8, 16])
def test_64_decode_steps(name: str, window: int) -> None:
    c, session = case(name), case(name).session(window=window)
    absorb(session, c.ids[:, :PROMPT])
    c.check(decode(session, c.ids[:, PROMPT:]), slice(None), PROMPT)


@every_model
def test_batches_of_unequal_lengths(name: str) -> None:
    """Prompts of three lengths, continued by a ragged chunk, then decoded in one batch."""
    c, session = case(name), case(name).session(window=8)
    held = [3, 17, 10]
    for row, length in enumerate(held):
        absorb(session, c.ids[row : row + 1, :length], first_slot=row)
    chunk = [2, 1, 5]
    ids = torch.zeros(ROWS, max(chunk), dtype=c.ids.dtype)
    for row, (length, count) in enumerate(zip(held, chunk)):
        ids[row, :count] = c.ids[row, length : length + count]
    logits = session.step(ids, query_lens=chunk, modes=[RowMode.ABSORB] * ROWS)
    session.commit(0, chunk)
    for row, (length, count) in enumerate(zip(held, chunk)):
        c.check(logits[row, :count], row, length)
    held = [length + count for length, count in zip(held, chunk)]
    for step in range(12):
        tokens = torch.stack([c.ids[row, length + step] for row, length in enumerate(held)])
        logits = session.step(tokens[:, None])
        session.commit(0, [1] * ROWS)
        for row, length in enumerate(held):
            c.check(logits[row], row, length + step)


@every_model
def test_rejected_drafts_leave_no_trace(name: str) -> None:
    c, session = case(name), case(name).session(window=8, max_draft_len=3)
    absorb(session, c.ids[:, :PROMPT])
    choose = random.Random(name)
    held = [PROMPT] * ROWS
    while max(held) + 4 <= PROMPT + 28:
        accepted = [choose.randint(1, 4) for _ in held]
        ids = torch.stack([c.ids[row, length : length + 4] for row, length in enumerate(held)])
        for row, count in enumerate(accepted):
            ids[row, count:] = (ids[row, count:] + 7) % 100
        logits = session.step(ids)
        session.commit(0, accepted)
        for row, (length, count) in enumerate(zip(held, accepted)):
            c.check(logits[row, :count], row, length)
        held = [length + count for length, count in zip(held, accepted)]


@every_model
def test_spellings_and_shards_give_the_same_weights(name: str, tmp_path: Path) -> None:
    """Hub and save_pretrained, one file and several, with and without MTP tensors."""
    model = build(name)
    folders = [
        write_hub(model, tmp_path / "hub1", shards=1, mtp=False),
        write_hub(model, tmp_path / "hub3", shards=3),
        write_saved(model, tmp_path / "saved1"),
        write_saved(model, tmp_path / "saved3", shards=3),
    ]
    made = []
    for folder in folders:
        target = tmp_path / f"{folder.name}.checkpoint"
        convert(folder, target, warn=lambda message: None)
        made.append(load_rank(target, 0))
    for weights in made[1:]:
        body = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
        assert body.keys() == made[0].keys()
        assert all(torch.equal(t, made[0][n]) for n, t in body.items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            "kimi_linear",
            {
                "linear_attn_config": None,
                "first_k_dense_replace": None,
                "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
                "linear_num_heads": 4,
                "linear_head_dim": 16,
                "linear_conv_kernel_dim": 4,
            },
            id="kimi_linear-kinds listed layer by layer",
        ),
        pytest.param("bailing_hybrid", {"num_hidden_layers": 5}, id="bailing_hybrid-layer behind the last group"),
    ],
)
def test_models_that_only_transformers_makes(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    """No published config says this, but a config class given plain arguments does."""
    model, ids = build(name, **changes), random_ids(1, 12)
    convert(write_saved(model, tmp_path / "hf"), tmp_path / "checkpoint", warn=lambda message: None)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", BuildOptions(max_batch_size=1, max_seq_len=12))
    session = Session(Engine.load(tmp_path / "engine", device="cpu"))
    assert float((absorb(session, ids) - reference_logits(model, ids)).abs().max()) < TOLERANCE
