"""Speculative decoding: drafts change the steps a text takes, never the text or its distribution."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import synthetic
import torch
import torch.distributed as dist
from hf_models import build
from hf_spelling import write_hub
from torch import Tensor

from trtllm_replayssm import LLM
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams, choose, choose_all, distribution
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.draft_length import DraftLength
from trtllm_replayssm.runtime.speculation.draft_model import DraftModelDrafter
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft, Drafter, Kept
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter
from trtllm_replayssm.runtime.speculation.options import SpeculationOptions
from trtllm_replayssm.runtime.speculation.statistics import SpeculationStatistics
from trtllm_replayssm.runtime.speculation.verification import verify

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
        assert 0.2 < counts.draft_acceptance_rate < 0.9


# ---- drafters --------------------------------------------------------------------------------------------------------


def test_prompt_lookup_takes_the_longest_and_the_latest_match() -> None:
    def drafts(tokens: list[int], limit: int = 4, longest: int = 3) -> tuple[int, ...]:
        made = NgramDrafter(longest)
        made.admit(0)
        found: tuple[int, ...] = ()
        for end in range(1, len(tokens) + 1):
            found = made.propose({0: Context(tokens[:end], SamplingParams(), limit)}).get(0, Draft()).tokens
        # One look at the whole text finds the same as following its growth.
        made.admit(0)
        assert found == made.propose({0: Context(tokens, SamplingParams(), limit)}).get(0, Draft()).tokens
        return found

    assert drafts([1, 2, 3, 4]) == ()
    assert drafts([7]) == ()
    assert drafts([1, 2, 3, 9, 8, 1, 2, 3], 2) == (9, 8)
    assert drafts([3, 9, 5, 6, 3, 8, 7, 3], 1) == (8,)
    assert drafts([2, 3, 9, 4, 3, 8, 2, 3], 1) == (9,)
    assert drafts([2, 3, 9, 4, 3, 8, 2, 3], 1, longest=1) == (8,)
    # A text that repeats itself goes on repeating itself.
    assert drafts([5, 6, 7, 6, 7], 5) == (6, 7, 6, 7, 6)


class Checked(MtpDrafter):
    """Compares every draft with one from a fresh session, whose head runs over the whole text at once."""

    compared = 0

    def propose(self, contexts: Mapping[int, Context]) -> dict[int, Draft]:
        drafts = super().propose(contexts)
        for slot, context in contexts.items():
            assert len(drafts[slot].tokens) == context.limit
            self.check(list(context.tokens), drafts[slot].tokens)
            self.compared += 1
        return drafts

    def check(self, tokens: list[int], drafts: Sequence[int]) -> None:
        fresh = MtpDrafter(Session(self.session.engine))
        fresh.session.step([tokens[:-1]], modes=[RowMode.ABSORB])
        hidden = fresh.session.hidden[0]
        for draft in drafts:
            output, logits = fresh.run({0: Kept(0, hidden, tokens[1:])})[0]
            # Near ties may fall either way.
            assert logits[draft] > logits.max() - 1e-3
            tokens, hidden = [*tokens, draft], torch.cat([hidden, output[None]])


def test_mtp_drafts_do_not_depend_on_what_was_rejected_or_where_a_request_has_been() -> None:
    target = session("qwen3_next")
    made = Checked(target)
    scheduler = Scheduler(target, made, time_slice=3)
    run(scheduler, [Request(i, [9, 5 + i] * 4, SamplingParams(max_tokens=20), frozenset(), None) for i in range(5)])
    assert made.compared > 50
    assert scheduler.statistics.num_accepted_draft_tokens > 0


def test_draft_length_follows_what_is_accepted() -> None:
    length = DraftLength(8)
    for _ in range(20):
        length.update(length.value, length.value)
    assert length.value == 8
    for _ in range(20):
        length.update(length.value, 0)
    assert length.value == 1
    for _ in range(20):
        length.update(length.value, length.value)
    assert length.value == 8
    for i in range(200):
        length.update(4, i % 3)
    assert 1 < length.value < 6
    before = length.value
    length.update(0, 0)
    assert length.value == before
    assert DraftLength(1).value == 1


def test_statistics_are_named_as_in_trtllm_bench() -> None:
    counts = SpeculationStatistics()
    assert (counts.draft_acceptance_rate, counts.acceptance_length) == (0, 0)
    counts.count(drafted=4, output=3)
    counts.count(drafted=0, output=1)
    assert (counts.num_draft_tokens, counts.num_accepted_draft_tokens) == (4, 2)
    assert (counts.draft_acceptance_rate, counts.acceptance_length) == (0.5, 2.0)


# ---- distributions ---------------------------------------------------------------------------------------------------


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square over the cells that are expected often enough; nothing where nothing can be."""
    total = counts.sum()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * total
    often = expected >= 5
    parts = [*zip(counts[often].tolist(), expected[often].tolist())]
    parts.append((float(counts[~often].sum()), float(expected[~often].sum())))
    statistic = sum((count - mean) ** 2 / mean for count, mean in parts if mean > 0)
    cells = len(parts) - 1
    # Mean and deviation of chi-square with so many degrees of freedom.
    assert statistic < cells + 4 * (2 * cells) ** 0.5, f"chi-square {statistic:.1f} of {cells} cells"


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8, "temperature": 1.5}]
)
@pytest.mark.parametrize("chance", [True, False], ids=["drawn", "certain"])
def test_verified_texts_keep_their_distribution(params: dict[str, Any], chance: bool) -> None:
    """Three tokens out of five, from a model and a worse draft model that are both tables; every text is enumerated."""
    size, runs = 5, 2000
    generator = torch.Generator().manual_seed(0)
    model, other = torch.randn(2, size, size, generator=generator) * 1.5
    other = model * 0.5 + other
    counts, exact = torch.zeros(size, size, size), torch.zeros(size, size, size, dtype=torch.float64)
    rows = torch.stack([distribution(row, SamplingParams(**params)) for row in model])
    exact += rows[0][:, None, None] * rows[:, :, None] * rows[None]
    accepted = 0
    for seed in range(runs):
        sampling, text = SamplingParams(seed=seed, **params), [0]
        while len(text) < 4:
            limit, drafted, probabilities = 3 - len(text), [], []
            for i in range(limit):
                row = other[(text + drafted)[-1]]
                if chance:
                    drafted.append(choose(row, sampling, len(text) + i, purpose="draft"))
                    probabilities.append(distribution(row, sampling))
                else:
                    drafted.append(int(row.argmax()))
            draft = Draft(tuple(drafted), torch.stack(probabilities) if probabilities else None)
            logits = model[torch.tensor([text[-1], *drafted])]
            own = choose_all(logits[None], {0: (sampling, len(text))})[0].tolist()
            new = verify(logits, own, draft, sampling, len(text))
            accepted += len(new) - 1
            text += new
        counts[tuple(text[1:])] += 1
    assert 0.2 * runs < accepted < 1.8 * runs
    assert_drawn_from(counts.double().flatten(), exact.flatten())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """A model of six tokens with all recurrences and a head, and another one to draft for it."""
    folder = tmp_path_factory.mktemp("pair")
    layers = tuple(layer for layer in synthetic.LAYERS if layer.kind in ("mamba2", "gated_delta", "kda", "attention"))
    options = BuildOptions(max_batch_size=64, max_seq_len=16, max_num_tokens=256, replay_window=4, max_draft_len=3)
    model = HybridDecoder(6, 64, 1e-5, layers, mtp=MTP)
    target = synthetic.write_engine(folder / "target", model, options)
    draft = synthetic.write_engine(folder / "draft", replace(model, layers=layers[:1], mtp=None), options, seed=1)
    return synthetic.load(target), synthetic.load(draft)


@pytest.mark.parametrize("kind", ["draft_model", "mtp", "ngram"])
def test_sampled_texts_of_engines_keep_their_distribution(pair: tuple[Engine, Engine], kind: str) -> None:
    """A thousand seeds of one prompt, three tokens each, against the probabilities that the model gives to all texts."""
    target = Session(pair[0])
    made: dict[str, Any] = {
        "draft_model": lambda: DraftModelDrafter(pair[1], pair[0]),
        "mtp": lambda: MtpDrafter(target),
        "ngram": NgramDrafter,
    }
    params, prompt, runs = {"temperature": 1.2, "top_p": 0.95}, [1, 2, 3, 1, 2], 1500
    texts = torch.cartesian_prod(*[torch.arange(6)] * 2)
    logits = absorbed(target, torch.tensor([[*prompt, *text] for text in texts.tolist()]))[:, len(prompt) - 1 :]
    exact = torch.zeros(6, 6, 6, dtype=torch.float64)
    for (a, b), rows in zip(texts.tolist(), logits):
        first, second, third = (distribution(row, SamplingParams(**params)) for row in rows)
        exact[a, b] = first[a] * second[b] * third
    asked = [Request(i, prompt, SamplingParams(max_tokens=3, seed=i, **params), frozenset(), None) for i in range(runs)]
    scheduler = Scheduler(target, made[kind]())
    counts = torch.zeros(6, 6, 6)
    for tokens in run(scheduler, asked):
        counts[tuple(tokens)] += 1
    assert_drawn_from(counts.double().flatten(), exact.flatten())
    assert 0.05 < scheduler.statistics.draft_acceptance_rate < 0.95
    if kind == "ngram":
        plain_texts = run(Scheduler(Session(pair[0])), [replaced(request) for request in asked[:100]])
        assert plain_texts == [request.tokens for request in asked[:100]]


def absorbed(target: Session, ids: Tensor) -> Tensor:
    """Logits of a pass over each row."""
    logits = target.step(ids, modes=[RowMode.ABSORB] * len(ids))
    target.commit(0, [ids.shape[1]] * len(ids))
    return logits


def replaced(request: Request) -> Request:
    """The request as it was before it ran."""
    return Request(request.request_id, request.prompt, request.params, request.end_ids, None)


# ---- ranks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    target: Path
    draft: Path
    result: Path


def texts_of_engines(target: Path, draft: Path) -> dict[str, list[list[int]]]:
    """Greedy and sampled texts by drafter, on one rank or on this one of several."""
    found = {}
    for kind in ("ngram", "mtp", "draft_model"):
        options = SpeculationOptions(kind, draft_engine_dir=draft if kind == "draft_model" else None)  # type: ignore[arg-type]
        llm = LLM(target, device="cpu", speculation=options)
        params = [SamplingParams(max_tokens=12, temperature=t, seed=7, end_id=-1) for t in (None, 1.0, None)]
        outputs = llm.generate([[5, 6, 5, 6, 5], [7] * 9, [8]], params)
        found[kind] = [output.outputs[0].token_ids for output in outputs]  # type: ignore[union-attr]
    return found


def save_texts(job: Job) -> int:
    found = texts_of_engines(job.target, job.draft)
    Path(f"{job.result}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    return 0


def test_two_ranks_speculate_as_one(tmp_path: Path) -> None:
    model = HybridDecoder(51, 64, 1e-5, synthetic.LAYERS[:7], mtp=MTP)
    small = replace(model, layers=model.layers[:2], mtp=None)
    for ranks in (1, 2):
        synthetic.write_engine(tmp_path / f"target{ranks}", model, OPTIONS, tp_size=ranks)
        synthetic.write_engine(tmp_path / f"draft{ranks}", small, OPTIONS, tp_size=ranks)
    expected = texts_of_engines(tmp_path / "target1", tmp_path / "draft1")
    job = Job(tmp_path / "target2", tmp_path / "draft2", tmp_path / "found")
    assert run_ranks(2, save_texts, job, "cpu") == 0
    for rank in range(2):
        assert json.loads(Path(f"{job.result}.{rank}").read_text(encoding="utf-8")) == expected


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_engines_that_cannot_speculate_are_refused(pair: tuple[Engine, Engine]) -> None:
    target, draft = pair
    with pytest.raises(UserError, match="max_draft_len is 4; the engine was built for 3 drafts"):
        Scheduler(Session(target), NgramDrafter(), 4)
    with pytest.raises(UserError, match="max_draft_len is 0"):
        Scheduler(Session(target), NgramDrafter(), 0)
    with pytest.raises(UserError, match="without room for drafts"):
        Scheduler(Session(synthetic.with_replay(target, max_draft_len=0)), NgramDrafter())
    with pytest.raises(UserError, match="draft engine was built for 1 drafts, the engine for"):
        DraftModelDrafter(synthetic.with_replay(draft, max_draft_len=1), target)
    with pytest.raises(UserError, match="same vocabulary"):
        DraftModelDrafter(engine("synthetic")[0], target)
    with pytest.raises(UserError, match="64 slots, fewer than the 65"):
        DraftModelDrafter(draft, replace(target, config=replace(target.config, max_batch_size=65, max_num_tokens=260)))
    with pytest.raises(UserError, match="cannot be looked up"):
        NgramDrafter(0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("draft_model", None, None), "go together"),
        (("ngram", None, Path("x")), "go together"),
        (("medusa", None, None), "'medusa' is not known"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[Any, ...], match: str) -> None:
    with pytest.raises(UserError, match=match):
        SpeculationOptions(*options)


@pytest.mark.parametrize("mode", ["ngram", "mtp", "draft_model"])
def test_the_command_speculates(
    mode: str, pair: tuple[Engine, Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"input_ids": [1, 2, 3, 1, 2]}\n{"input_ids": [4]}\n')
    words = [
        "generate",
        "--engine_dir",
        str(pair[0].folder),
        "--input_file",
        str(tmp_path / "in.jsonl"),
        "--device",
        "cpu",
    ]
    assert main([*words, "--max_output_len", "9"]) == 0
    expected = capsys.readouterr()
    assert "acceptance_length" not in expected.err
    speculation = ["--speculative_decoding_mode", mode, "--max_draft_len", "2"]
    speculation += ["--draft_engine_dir", str(pair[1].folder)] if mode == "draft_model" else []
    assert main([*words, "--max_output_len", "9", *speculation]) == 0
    found = capsys.readouterr()
    assert found.out == expected.out
    assert "num_draft_tokens" in found.err
    assert "acceptance_length" in found.err
    assert main([*words, *speculation[:2], "--max_draft_len", "4"]) == 1
    assert main([*words, "--max_draft_len", "2"]) == 1
    assert "--speculative_decoding_mode" in capsys.readouterr().err
