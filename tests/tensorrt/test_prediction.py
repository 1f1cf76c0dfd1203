"""A prediction head whose indexer keeps a ring, as a plan: pieces of prompts and drafts that are rejected equal torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from engine_pair import TOLERANCE, Pair, Sessions, tokens

from trtllm_replayssm.builders.layers.indexer import PooledIndexer
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.model import Mtp

HEAD = Mla(4, 32, 16, 0, 16, 1e-6, 24, 1e-6, indexer=PooledIndexer(8, 16, 4, 3, 1e-6))


def test_heads_with_an_indexer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(synthetic.decoder(synthetic.LAYERS[:1]), mtp=Mtp((HEAD,)))
    sessions = Sessions(Pair(tmp_path, model), monkeypatch)
    heads = [session.prediction for session in sessions.both]
    ids, hidden = tokens(2, 40, 1).int(), torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(2))
    starts = [0, 0]
    # Pieces of unequal lengths, of which rows take part or not; behind each of them two drafts that come to nothing.
    for lengths in ([17, 14], [0, 3], [2, 1], [4, 4], [1, 2], [3, 0]):
        for spare in (0, 1, 2):
            count = lengths if spare == 0 else [int(length > 0) for length in lengths]
            first = [start + (length + spare - 1 if spare else 0) for start, length in zip(starts, lengths)]
            wide = max(count)
            given = [torch.zeros(2, wide, dtype=torch.int32), torch.zeros(2, wide, 64)]
            for row, (start, n) in enumerate(zip(first, count)):
                given[0][row, :n] = ids[row, start : start + n] + (spare > 0)
                given[1][row, :n] = hidden[row, start : start + n]
            expected, got = (head.run(0, given[0] % synthetic.VOCAB_SIZE, first, count, given[1]) for head in heads)
            for row in (row for row in range(2) if count[row]):
                for theirs, ours in zip(expected, got):
                    torch.testing.assert_close(ours[row], theirs[row], **TOLERANCE)
        starts = [start + length for start, length in zip(starts, lengths)]
