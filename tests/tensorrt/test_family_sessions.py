"""One model of every family as plans: prefill, verification with rejected drafts and decoding equal the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from engine_pair import Pair, Sessions, tokens

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.validation.catalogue import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_plans_equal_the_embedded_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]
    decoder = find_family({"architectures": [model.model_class], **model.arguments}, {}).decoder()
    sessions = Sessions(Pair(tmp_path, decoder), monkeypatch)
    ids = tokens(2, 40, 3) % decoder.vocab_size
    for slot in range(2):
        sessions.same("prefill", slot, ids[slot, : 19 + slot], 11)
    for start, (count, accepted) in zip((20, 22, 23, 26), ((4, 2), (1, 1), (3, 3), (2, 1))):
        sessions.same("step", ids[:, start : start + count])
        sessions.same("commit", 0, [accepted] * 2)
    assert sessions.mine.written.tolist()[:2] == sessions.theirs.written.tolist()[:2]
