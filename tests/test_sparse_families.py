"""GLM-5.3-Flash and Qwen3.8-Flash-Next beyond what every family is tested for: ends of texts, dense contexts, dropped parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import build, reference_logits
from hf_spelling import read_folder, write_folder, write_hub
from test_parity import PROMPT, ROWS, absorb, case, decode

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.runtime.session import Session

QWEN4 = ["qwen4_exp_text", "qwen4_exp_vl"]


@pytest.mark.parametrize("name", QWEN4)
def test_ngrams_do_not_reach_across_the_end_of_a_text(name: str) -> None:
    """Ends at every distance from each other and from the borders of chunks and steps, with drafts that are ends, rejected."""
    c = case(name)
    ids = c.ids[:, :34].clone()
    for row, places in enumerate(((0, 3, 4, 9, 16, 18, 25), (1, 8, 15, 20, 21, 22, 29), (7, 12, 14, 26, 27, 33))):
        ids[row, list(places)] = 2
    expected = reference_logits(build(name), ids)
    session = c.session(window=8, max_draft_len=3)
    pieces = [absorb(session, ids[:, start:end]) for start, end in ((0, 2), (2, 9), (9, 10), (10, 16))]
    for start in range(16, 34, 2):
        drafts = torch.cat((ids[:, start : start + 2], torch.full((ROWS, 2), 2)), 1)
        pieces.append(session.step(drafts)[:, :2])
        session.commit(0, [2] * ROWS)
    assert float((torch.cat(pieces, 1) - expected).abs().max()) < c.tolerance
    # The ends matter: taken for ordinary tokens, they give other logits.
    layers = (replace(layer, end_token=1) if layer.kind == "ngram" else layer for layer in c.engine.decoder.layers)
    unaware = replace(c.engine, decoder=replace(c.engine.decoder, layers=tuple(layers)))
    assert float((absorb(Session(unaware), ids) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["glm5_next", *QWEN4])
def test_short_contexts_are_dense(name: str) -> None:
    """Up to as many blocks as are chosen, an engine without indexers gives the very same logits; then no more."""
    c = case(name)
    engine = c.engine

    def dense(layer: Layer) -> Layer:
        return replace(layer, indexer=None) if getattr(layer, "indexer", None) else layer

    decoder = replace(engine.decoder, layers=tuple(map(dense, engine.decoder.layers)))
    sparse, whole = c.session(), Session(replace(c.session().engine, decoder=decoder))
    # 16 tokens in chosen blocks, and the open block behind them.
    results = [
        torch.cat([absorb(session, c.ids[:, :PROMPT]), decode(session, c.ids[:, PROMPT:40])], 1)
        for session in (sparse, whole)
    ]
    assert torch.equal(results[0][:, :18], results[1][:, :18])
    assert float((results[0][:, 24:] - results[1][:, 24:]).abs().max()) > 1e-2


@pytest.mark.parametrize("name", QWEN4)
def test_what_is_left_out_is_said(name: str, tmp_path: Path) -> None:
    """The head over residual streams, and in saves of transformers the constants of the hash."""
    model, notes = build(name), []
    convert(write_hub(model, tmp_path / "hub"), tmp_path / "a", warn=notes.append)
    assert any("multi-token prediction over residual streams" in note for note in notes)
    notes.clear()
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "b", warn=notes.append)
    assert any("constants of the n-gram hash" in note for note in notes)


def test_tables_in_equal_parts_are_written_part_by_part() -> None:
    """95 GiB are never in memory as a whole; unequal parts are put together."""
    parts = {name: next(layer for layer in case(name).engine.decoder.layers if layer.kind == "ngram") for name in QWEN4}
    assert all(isinstance(layer, NgramEmbedding) for layer in parts.values())
    assert [layer.shards for layer in parts.values()] == [2, 1]


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    config, tensors = read_folder(write_hub(build("qwen4_exp_text"), tmp_path / "hub"))
    name = next(n for n in tensors if n.endswith("ngram_embedding.shard_1.weight"))
    tensors[name] = tensors[name][:-1]
    folder = write_folder(tmp_path / "edited", config, tensors, 1)
    with pytest.raises(CheckpointError, match=r"ngram_embedding\.shard_0\.weight"):
        convert(folder, tmp_path / "checkpoint", warn=lambda message: None)
