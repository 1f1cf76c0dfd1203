"""Everything above the session uses plans as it uses torch: scheduler, sampling, speculation, LLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from engine_pair import Pair

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import Mtp
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.runtime.generation import generate
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.options import SpeculationOptions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("engines"))


def texts(session: Session, speculation: SpeculationOptions | None) -> tuple[list[list[int]], int]:
    """Greedy tokens of more prompts than there are slots, preempted now and then, and the accepted drafts."""
    drafter = speculation.drafter(session) if speculation else None
    scheduler = Scheduler(session, drafter, time_slice=5)
    params = SamplingParams(max_tokens=18)
    requests = [Request(i, [9, 5 + i, 7] * (2 + i), params, frozenset(), None) for i in range(6)]
    generate(scheduler, requests)
    return [request.tokens for request in requests], scheduler.statistics.num_accepted_draft_tokens


@pytest.mark.parametrize("mode", [None, "ngram", "draft_model"])
def test_scheduler_and_speculation_use_either(mode: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model is an engine of plans, too: the same one, whose drafts are all right."""
    results = []
    for one in (pair.embedded, pair.load(monkeypatch)):
        folder = one.folder if mode == "draft_model" else None
        results.append(texts(Session(one), SpeculationOptions(mode, draft_engine_dir=folder) if mode else None))
    assert results[0] == results[1]
    assert (results[0][1] > 0) == (mode is not None)


def test_prediction_head_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (Attention(4, 1, 32, 32**-0.5, Rope(8, 1e4)), Moe(8, 3, 32, "swiglu", "softmax"))
    model = replace(synthetic.decoder(synthetic.LAYERS[:1] + synthetic.LAYERS[6:7]), mtp=Mtp(layers))
    pair = Pair(tmp_path, model)
    engine = pair.load(monkeypatch)
    assert list(engine.config.tensorrt.files) == ["rank0.engine", "rank0.mtp.engine", "rank0.state.safetensors"]
    results = [texts(Session(one), SpeculationOptions("mtp")) for one in (pair.embedded, engine)]
    assert results[0] == results[1]


def test_llm_generates_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, synthetic.decoder(synthetic.LAYERS[:2], vocab_size=synthetic.TEXT_VOCAB_SIZE))
    pair.load(monkeypatch)
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3)
    prompts = [[5, 6, 7], [8] * 20]
    expected, got = (
        [output.outputs[0].token_ids for output in LLM(folder, device="cpu").generate(prompts, params)]
        for folder in (pair.embedded.folder, pair.folder)
    )
    assert got == expected


def test_prompts_that_begin_alike_are_computed_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(session: Session, cache: PrefixCache | None) -> tuple[list[list[int]], list[int]]:
        scheduler = Scheduler(session, None, None, None, cache)
        shared = [5, 9, 7, 3] * 16
        requests = []
        for i in range(4):
            requests.append(Request(i, [*shared, 6 + i, 8], SamplingParams(max_tokens=6), frozenset(), None))
            generate(scheduler, requests[-1:])
        return [request.tokens for request in requests], [request.cached_tokens for request in requests]

    session = Session(pair.load(monkeypatch))
    expected, _ = run(Session(pair.embedded), None)
    got, cached = run(session, PrefixCache(session, 1 << 24))
    assert got == expected
    assert cached[-1] == 64
