"""Penalties and least lengths: their formulas against transformers, whole requests against both, drafts without effect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import synthetic
import torch
from scheduling import MODEL, OPTIONS, alone, finish, request, scheduler
from test_speculation import MTP, absorbed, assert_drawn_from
from torch import Tensor
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.job import Job
from trtllm_replayssm.runtime.penalties import Penalties
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import NUMBERS, ROWS_AT_ONCE, SamplingParams, distribution
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter

VOCAB = 40
#: Every parameter alone, and all together.
KINDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "encouraged": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.4},
    "wanted": {"presence_penalty": -2.0, "frequency_penalty": -0.3},
    "least": {"min_tokens": 7},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 9},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("penalties") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


def expected(logits: Tensor, prompt: list[int], said: list[int], params: SamplingParams, ends: list[int]) -> Tensor:
    """Logits ``[vocab]`` as transformers' processors and OpenAI's formula change them."""
    processors = LogitsProcessorList()
    if params.repetition_penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    read = torch.tensor([[*prompt, *said]])
    x = processors(read, logits[None].clone())[0]
    for token in set(said):
        x[token] -= said.count(token) * (params.frequency_penalty or 0) + (params.presence_penalty or 0)
    if params.min_tokens and ends:
        least = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends, device="cpu")
        x = least(read, x[None])[0]
    return x


def job(prompt: list[int], said: list[int], ends: list[int] = [], **params: Any) -> Job:  # noqa: B006
    made = Request(0, prompt, SamplingParams(max_tokens=99, **params), frozenset(ends), None)
    for token in said:
        made.append(token)
    return Job(made, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_formulas_are_those_of_transformers_and_openai(kind: str) -> None:
    """A slot with a history, one that has just begun, one whose parameters change nothing, and one that verifies drafts."""
    generator = torch.Generator().manual_seed(4)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB // 2, (count,), generator=generator).tolist()

    ends, penalties = [3, 11], Penalties(VOCAB, torch.device("cpu"))
    histories = {2: (tokens(9), tokens(12)), 3: (tokens(5), []), 4: (tokens(5), tokens(6)), 6: (tokens(4), tokens(5))}
    jobs = {s: job(*h, ends, **(KINDS[kind] if s != 4 else {})) for s, h in histories.items()}
    for slot, made in jobs.items():
        penalties.place(slot, made.request)
    drafts = {6: tokens(3), 2: tokens(1)}
    logits = 3 * torch.randn(5, 4, VOCAB, generator=generator)
    before = logits.clone()
    changed = penalties.apply(logits, 2, jobs, drafts)
    assert torch.equal(logits, before)
    for slot, (prompt, said) in histories.items():
        for place in range(1 + len(drafts.get(slot, ()))):
            read = said + drafts.get(slot, [])[:place]
            want = expected(before[slot - 2, place], prompt, read, jobs[slot].request.params, ends)
            torch.testing.assert_close(changed[slot - 2, place], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(changed[3], before[3])  # nobody's
    assert torch.equal(changed[2], before[2])


def test_what_changes_nothing_costs_nothing() -> None:
    penalties, logits = Penalties(VOCAB, torch.device("cpu")), torch.randn(1, 1, VOCAB)
    neutral = job([1], [2], [3], repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0, min_tokens=1)
    penalties.place(0, neutral.request)
    assert penalties.apply(logits, 0, {0: neutral}, {}) is logits
    assert len(penalties.said) == 0


def test_tables_grow_and_are_used_again() -> None:
    """More slots than one piece, which come and go: the newest request of a slot counts."""
    penalties, count = Penalties(VOCAB, torch.device("cpu")), ROWS_AT_ONCE + 9
    for turn in range(3):
        jobs = {slot: job([slot % 7], [turn] * (slot % 3), frequency_penalty=1.0) for slot in range(count)}
        for slot, made in jobs.items():
            penalties.place(slot, made.request)
        penalties.count([*jobs, 5, 5], torch.tensor([*[8 + turn] * count, 20, 20]))
        changed = penalties.apply(torch.zeros(count, 1, VOCAB), 0, jobs, {})
        for slot in jobs:
            want = torch.zeros(VOCAB)
            want[turn] -= slot % 3
            want[8 + turn] -= 1
            want[20] -= 2 * (slot == 5)
            assert torch.equal(changed[slot, 0], want)
    assert len(penalties.said) == 128


def test_tables_have_a_row_for_each_penalised_request_that_runs(engine: Engine) -> None:
    """Not for those that have ended, whose slots stay empty: one at a time, in the second slot and then in the first."""
    made = scheduler(engine)
    for name, params in enumerate(({"max_tokens": 2}, {"max_tokens": 2, "presence_penalty": 1.0})):
        made.submit(request(engine, name, [2], **params))
    finish(made)
    made.submit(late := request(engine, 2, [2], max_tokens=20, presence_penalty=1.0))
    finish(made)
    assert len(made.launcher.sampler.penalties.said) == 1
    assert late.tokens == alone(engine, 2, [2], max_tokens=20, presence_penalty=1.0).tokens


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.4, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_chosen_from_penalised_logits(engine: Engine, kind: str, sampled: dict[str, Any]) -> None:
    """Kept logits are the model's own, so that the processors can be applied to them afterwards."""
    free = alone(engine, 0, [5, 6, 5, 7], max_tokens=24, **sampled)
    ends = [free.tokens[2]]
    params = KINDS[kind] | sampled | {"max_tokens": 24, "stop_token_ids": ends}
    asked = alone(engine, 0, [5, 6, 5, 7], return_generation_logits=True, logprobs=0, **params)
    assert (asked.tokens != free.tokens[: len(asked.tokens)]) or asked.finish_reason == "stop"
    assert len(asked.tokens) >= asked.params.min_tokens
    known = synthetic.TEXT_TOKENS
    for place, (token, row) in enumerate(zip(asked.tokens, asked.logits)):
        changed = expected(row[:known], asked.prompt, asked.tokens[:place], asked.params, ends)
        if asked.params.greedy:
            assert token == int(changed.argmax())
        else:
            assert distribution(changed, asked.params)[token] > 0
        assert asked.logprobs[place][token].logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)


def test_stop_strings_do_not_end_a_text_too_early(engine: Engine) -> None:
    free = alone(engine, 0, [2], max_tokens=30)
    word = free.text[:1]
    early = alone(engine, 0, [2], max_tokens=30, stop=word)
    late = alone(engine, 0, [2], max_tokens=30, stop=word, min_tokens=12)
    assert early.finish_reason == "stop" and len(early.tokens) < 12
    assert len(late.tokens) >= 12
    assert late.text.startswith(word)
    assert late.tokens == free.tokens[: len(late.tokens)]


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "draft_model", "given", "cached"])
def test_drafts_preemption_and_the_batch_change_no_token(engine: Engine, kind: str) -> None:
    """Seven requests with different parameters share four slots, and some are taken out and come back."""
    made = scheduler(engine, kind if kind not in ("given", "cached") else "plain", time_slice=6)
    if kind == "cached":
        made.prefix_cache = PrefixCache(made.session, 1 << 22)
    wanted, asked = [], []
    for name, params in enumerate(KINDS.values()):
        prompt = [9, 5 + name] * 8
        given = params | {"max_tokens": 26, "stop_token_ids": [7, 9, 200]}
        if kind in ("plain", "ngram", "given", "cached"):
            given |= {"temperature": 0.9, "seed": name} if name % 2 else {}
        wanted.append(alone(engine, name, prompt, **given).tokens)
        drafts = wanted[-1][: 5 + name] if kind == "given" else ()
        asked.append(request(engine, name, prompt, drafts=drafts, **given))
    for one in asked:
        made.submit(one)
    finish(made)
    assert [one.tokens for one in asked] == wanted
    if kind == "given":
        assert sum(one.statistics.num_accepted_draft_tokens for one in asked) > 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """A model of five tokens with a head, and another one to draft for it."""
    folder = tmp_path_factory.mktemp("pair")
    layers = tuple(layer for layer in synthetic.LAYERS if layer.kind in ("mamba2", "attention"))
    options = BuildOptions(max_batch_size=125, max_seq_len=16, max_num_tokens=1000, replay_window=4, max_draft_len=3)
    model = HybridDecoder(5, 64, 1e-5, layers, mtp=MTP)
    target = synthetic.write_engine(folder / "target", model, options)
    draft = synthetic.write_engine(folder / "draft", HybridDecoder(5, 64, 1e-5, layers[:1]), options, seed=1)
    return synthetic.load(target), synthetic.load(draft)


@pytest.mark.parametrize("kind", ["plain", "draft_model", "mtp", "ngram"])
def test_sampled_texts_have_the_distribution_of_penalised_logits(pair: tuple[Engine, Engine], kind: str) -> None:
    """Seeds of one prompt, four tokens each, against the probabilities of all texts; place by place, as the text grows."""
    target = Session(pair[0])
    drafter: Any = {
        "plain": lambda: None,
        "draft_model": lambda: DraftModelDrafter(pair[1], pair[0]),
        "mtp": lambda: MtpDrafter(target),
        "ngram": NgramDrafter,
    }[kind]()
    values = {"temperature": 1.1, "repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.9}
    params, prompt, runs, size = SamplingParams(min_tokens=2, **values), [1, 2, 3, 1, 2], 1500, 5
    texts = torch.cartesian_prod(*[torch.arange(size)] * 3)
    logits = absorbed(target, torch.tensor([[*prompt, *text] for text in texts.tolist()]))[:, len(prompt) - 1 :]
    exact = torch.zeros(*[size] * 4, dtype=torch.float64)
    for text, rows in zip(texts.tolist(), logits):
        places = [
            distribution(expected(row, prompt, text[:place], params, [4]), params) for place, row in enumerate(rows)
        ]
        ended = text.index(4) + 1 if 4 in text else 4
        if ended < 4:
            # What follows the end is not said; it counts as the token 0.
            if any(text[ended:]):
                continue
            exact[tuple(text)][0] += math.prod(float(places[i][text[i]]) for i in range(ended))
        else:
            exact[tuple(text)] += math.prod(float(places[i][text[i]]) for i in range(3)) * places[3]
    assert float(exact.sum()) == pytest.approx(1)
    made = Scheduler(target, drafter)
    asked = []
    for seed in range(runs):
        sampling = SamplingParams(max_tokens=4, min_tokens=2, seed=seed, **values)
        asked.append(Request(seed, prompt, sampling, frozenset([4]), None))
        made.submit(asked[-1])
    finish(made)
    counts = torch.zeros(*[size] * 4)
    for one in asked:
        counts[tuple([*one.tokens, 0, 0][:4])] += 1
    assert_drawn_from(counts.double().flatten(), exact.flatten())
    if drafter is not None:
        assert made.statistics.num_accepted_draft_tokens > 100
        assert made.statistics.draft_acceptance_rate < 0.95


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 1.0}, "min_tokens is 1.0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than max_tokens, which is 8"),
    ],
)
def test_values_without_a_meaning_are_refused(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        SamplingParams(**params)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_bounds_are_the_same_for_a_server_that_hands_penalties_on_as_float32(name: str) -> None:
    low, high, _ = NUMBERS[name]
    for value in (low, high, 1e-6 if low > 0 else -1e6, 1e6):
        handed_on = float(torch.tensor(getattr(SamplingParams(**{name: value}), name), dtype=torch.float32))
        assert getattr(SamplingParams(**{name: handed_on}), name) == handed_on


def test_a_text_that_cannot_go_on_is_refused(engine: Engine) -> None:
    made = scheduler(engine)
    with pytest.raises(UserError, match="every token ends the text"):
        made.submit(request(engine, 0, [2], stop_token_ids=list(range(synthetic.TEXT_TOKENS)), min_tokens=2))
