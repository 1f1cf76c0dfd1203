"""Speculative decoding: drafts change the steps a text takes, never the text or its distribution."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import synthetic
import torch
from hf_models import build
from hf_spelling import write_hub

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter

OPTIONS = BuildOptions(max_batch_size=3, max_seq_len=120, max_num_tokens=36, replay_window=8, max_draft_len=4)
MTP = Mtp((Attention(4, 1, 32, 32**-0.5, Rope(8, 1e4), 1e-6), Mlp(48, "swiglu")))
#: Mamba-2, Gated DeltaNet and KDA in one model, then families as transformers builds them, all with an MTP head.
MODELS = ("synthetic", "nemotron_h_latent", "qwen3_next", "qwen3_5_text_tied_v3", "bailing_hybrid")


@cache
def engine(name: str) -> tuple[Engine, TemporaryDirectory[str]]:
    folder = TemporaryDirectory()
    root = Path(folder.name)
    if name == "synthetic":
        model = HybridDecoder(51, 64, 1e-5, synthetic.LAYERS, mtp=MTP)
        return synthetic.load(synthetic.write_engine(root / "engine", model, OPTIONS)), folder
    convert(write_hub(build(name), root / "hf"), root / "checkpoint", warn=lambda message: None)
    build_engine(root / "checkpoint", root / "engine", OPTIONS)
    return synthetic.load(root / "engine"), folder


def session(name: str) -> Session:
    """Its pools hold NaN, so that nothing stale can pass for a zero."""
    made = Session(engine(name)[0])
    for pool in made.pools.values():
        pool.fill_(float("nan"))
    return made


class Oracle(Drafter):
    """Knows the texts and errs at random: every count of drafts, and of right ones among them, occurs."""

    def __init__(self, texts: Iterable[list[int]]) -> None:
        self.texts, self.random = list(texts), random.Random(0)

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        drafts = {}
        for slot, context in contexts.items():
            text = next(t for t in self.texts if t[: len(context.tokens)] == list(context.tokens))
            tokens = text[len(context.tokens) :][: self.random.randint(0, context.limit)]
            right = len(tokens) if self.random.random() < 0.5 else self.random.randint(0, len(tokens))
            drafts[slot] = Draft(tuple((token + (i == right)) % 50 for i, token in enumerate(tokens)))
        return drafts


def drafter(kind: str, target: Session, texts: dict[tuple[int, ...], list[int]]) -> Drafter | None:
    made: dict[str, Any] = {
        "plain": lambda: None,
        "ngram": NgramDrafter,
        "mtp": lambda: MtpDrafter(target),
        "draft_model": lambda: DraftModelDrafter(target.engine, target.engine),
        "oracle": lambda: Oracle(texts.values()),
    }
    return made[kind]()


def run(scheduler: Scheduler, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        scheduler.submit(request)
    while scheduler.busy:
        for update in scheduler.step():
            if update.error is not None:
                raise update.error
    return [request.tokens for request in requests]


def requests(seed: int, count: int = 5, **params: Any) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        prompt = torch.randint(3, 50, (1 + 7 * i,), generator=generator).tolist()
        made.append(Request(i, prompt, SamplingParams(max_tokens=30 + i, **params), frozenset(), None))
    return made


@cache
def plain(name: str, **params: Any) -> dict[tuple[int, ...], list[int]]:
    """Prompt and greedy text, by prompt."""
    asked = requests(0, **params)
    run(Scheduler(session(name)), asked)
    return {tuple(r.prompt): r.history for r in asked}


@pytest.mark.parametrize("kind", ["ngram", "mtp", "draft_model", "oracle"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_plain_text(name: str, kind: str) -> None:
    expected, target = plain(name), session(name)
    scheduler, asked = Scheduler(target, drafter(kind, target, expected)), requests(0)
    run(scheduler, asked)
    for request in asked:
        assert request.history == expected[tuple(request.prompt)]
    counts = scheduler.statistics
    assert counts.num_output_tokens == counts.num_steps + counts.num_accepted_draft_tokens
    if kind == "draft_model":
        # The model itself drafts: everything is right.
        assert counts.draft_acceptance_rate == 1.0
        assert counts.acceptance_length > 3
    if kind == "oracle":
        assert 0.2 < counts.draft_acceptance_rate < 0.8
