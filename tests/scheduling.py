"""An engine of every recurrence, small enough for thousands of steps, and schedulers and requests for it."""

from __future__ import annotations

import os
from typing import Any

import synthetic

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.outputs import Update
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculation.drafter import Drafter
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter
from trtllm_replayssm.runtime.tokenizer import TextStream, Tokenizer

#: All three recurrences and attention, small enough for thousands of steps.
LAYERS = (
    Mamba2(num_heads=4, head_dim=8, state_size=8, n_groups=2, conv_kernel=4, norm_epsilon=1e-5),
    GatedDelta(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8, conv_kernel=4, norm_epsilon=1e-6),
    Kda(num_heads=2, head_dim=8, conv_kernel=4, norm_epsilon=1e-6),
    Attention(2, 1, 16, 0.25),
)
MODEL = HybridDecoder(synthetic.TEXT_VOCAB_SIZE, 32, 1e-5, LAYERS, mtp=Mtp((Attention(2, 1, 16, 0.25),)))
OPTIONS = BuildOptions(max_batch_size=4, max_seq_len=64, max_num_tokens=32, replay_window=6, max_draft_len=3)
#: Requests of the random runs; the issue of a release is judged with more.
REQUESTS = int(os.environ.get("SCHEDULER_TEST_REQUESTS", "120"))


def scheduler(engine: Engine, kind: str = "plain", **options: Any) -> Scheduler:
    """On pools that hold NaN, so that nothing stale can pass for a zero."""
    session = Session(engine)
    for pool in session.pools.values():
        pool.fill_(float("nan"))
    drafters: dict[str, Any] = {
        "plain": lambda: None,
        "ngram": NgramDrafter,
        "mtp": lambda: MtpDrafter(session),
        "draft_model": lambda: DraftModelDrafter(engine, engine),
    }
    drafter: Drafter | None = drafters[kind]()
    return Scheduler(session, drafter, **options)


def request(engine: Engine, name: int, prompt: list[int], **params: Any) -> Request:
    stream, drafts = TextStream(Tokenizer(engine.folder), skip_special_tokens=True), params.pop("drafts", ())
    sampling = SamplingParams(**{"end_id": -1} | params)
    return Request(name, prompt, sampling, sampling.end_ids([1]), stream, drafts)


def finish(made: Scheduler) -> list[Update]:
    updates = []
    while made.busy:
        updates += made.step()
    return updates


def alone(engine: Engine, name: int, prompt: list[int], **params: Any) -> Request:
    made, asked = scheduler(engine), request(engine, name, prompt, **params)
    made.submit(asked)
    finish(made)
    return asked
