"""The prefix cache: it saves the steps it should, changes no bit, and stays within its memory."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from scheduling import MODEL, OPTIONS, REQUESTS, alone, finish, request, scheduler

from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.speculation.drafter import Context, Draft
from trtllm_replayssm.runtime.speculation.mtp import MtpDrafter

PLENTY = 1 << 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("prefix_cache") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


def caching(
    engine: Engine, kind: str = "plain", max_bytes: int = PLENTY, **options: Any
) -> tuple[Scheduler, PrefixCache]:
    made = scheduler(engine, kind, **options)
    made.prefix_cache = PrefixCache(made.session, max_bytes)
    return made, made.prefix_cache


def ask(made: Scheduler, prompt: list[int], **params: Any) -> Request:
    """Run one request to its end."""
    engine = made.session.engine
    made.submit(asked := request(engine, 0, prompt, **({"max_tokens": 6, "return_generation_logits": True} | params)))
    assert not [update for update in finish(made) if update.error]
    return asked


def held_bytes(cache: PrefixCache) -> int:
    """What the tree holds, counted tensor by tensor."""
    total, nodes = 0, [cache.root]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        total += sum(rows.nbytes for rows in node.rows.values())
        if node.snapshot is not None:
            total += node.snapshot.hidden.nbytes + sum(t.nbytes for t in node.snapshot.tensors.values())
        assert node is cache.root or node.children or node.snapshot, "a chunk that leads nowhere"
    return total


def same(a: Request, b: Request) -> bool:
    return a.tokens == b.tokens and torch.equal(torch.stack(a.logits), torch.stack(b.logits))


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "draft_model"])
def test_a_prompt_resumes_where_an_earlier_one_was_and_no_bit_changes(engine: Engine, kind: str) -> None:
    chunk, (made, cache) = engine.config.prefill_chunk, caching(engine, kind)
    system = [2 + i % 50 for i in range(3 * chunk)]
    first = ask(made, [*system, 7, 8])
    assert first.cached_tokens == 0
    for tail in ([9], [7, 8, 9], [11, 12, 13, 14] * 3):
        asked = ask(made, [*system, *tail])
        assert asked.cached_tokens == 3 * chunk
        if kind == "plain":
            assert same(asked, alone(engine, 0, asked.prompt, max_tokens=6, return_generation_logits=True))
        else:
            assert asked.tokens == alone(engine, 0, asked.prompt, max_tokens=6).tokens
    assert cache.statistics.hits == 9 * chunk
    assert cache.statistics.queries == 4 * 3 * chunk + 2 + 1 + 3 + 12


def test_where_prompts_part_is_remembered(engine: Engine) -> None:
    """The second prompt shows where they part, the third is the first that can resume there."""
    chunk, (made, _) = engine.config.prefill_chunk, caching(engine)
    system = [2 + i % 50 for i in range(2 * chunk)]
    prompts = [[*system, *[60 + i] * (2 * chunk)] for i in range(4)]
    assert [ask(made, prompt).cached_tokens for prompt in prompts] == [0, 0, 2 * chunk, 2 * chunk]
    # All of a prompt is known by then, but its last token has to be computed for the token behind it.
    assert [ask(made, prompts[0]).cached_tokens for _ in range(2)] == [2 * chunk, 3 * chunk]


def test_a_prompt_without_a_whole_chunk_is_not_kept(engine: Engine) -> None:
    made, cache = caching(engine)
    assert [ask(made, [5, 6, 7]).cached_tokens for _ in range(2)] == [0, 0]
    assert cache.nbytes == 0


def predictions(made: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The list to which every later step adds the logits from which the head drafts first."""
    drafter, seen = made.drafter, list[torch.Tensor]()
    assert isinstance(drafter, MtpDrafter)
    genuine = drafter.propose

    def propose(contexts: Mapping[int, Context]) -> dict[int, Draft]:
        seen.extend(drafter.latest[slot].logits.clone() for slot in contexts)
        return genuine(contexts)

    monkeypatch.setattr(drafter, "propose", propose)
    return seen


def test_drafts_of_the_head_are_as_good_as_without_the_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's caches travel with the prefix; its last row depends on the token behind the prefix."""
    chunk, (made, _) = engine.config.prefill_chunk, caching(engine, "mtp")
    seen = predictions(made, monkeypatch)
    system = [2 + i % 50 for i in range(2 * chunk)]
    ask(made, [*system, 90], max_tokens=2)
    for tail in (91, 92, 93):
        seen.clear()
        resumed = ask(made, [*system, tail], max_tokens=20)
        plain = scheduler(engine, "mtp")
        expected = predictions(plain, monkeypatch)
        plain.submit(fresh := request(engine, 0, resumed.prompt, max_tokens=20))
        finish(plain)
        assert resumed.cached_tokens == 2 * chunk
        assert resumed.tokens == fresh.tokens
        assert resumed.statistics == fresh.statistics
        # A head with random weights is never right, and its statistics say nothing of what it predicts.
        assert len(seen) == len(expected) > 0
        torch.testing.assert_close(torch.stack(seen), torch.stack(expected), rtol=0, atol=1e-4)


def test_the_least_recently_used_goes_first_and_the_budget_holds(engine: Engine) -> None:
    chunk, (made, cache) = engine.config.prefill_chunk, caching(engine)
    prompts = [[10 * i + 2] * (chunk + 1) for i in range(4)]
    ask(made, prompts[0])
    one = cache.nbytes
    assert one == held_bytes(cache) > 0
    made, cache = caching(engine, max_bytes=2 * one)
    for prompt in prompts[:2]:
        ask(made, prompt)
    assert ask(made, prompts[0]).cached_tokens == chunk  # now the second is the oldest
    ask(made, prompts[2])
    assert cache.nbytes == held_bytes(cache) <= cache.max_bytes
    assert cache.statistics.evictions == 1
    assert [ask(made, prompts[i]).cached_tokens for i in (0, 2)] == [chunk, chunk]
    assert ask(made, prompts[1]).cached_tokens == 0
    cache.clear()
    assert cache.nbytes == held_bytes(cache) == 0


def test_what_does_not_fit_at_all_is_left_out(engine: Engine) -> None:
    made, cache = caching(engine, max_bytes=100)
    assert [ask(made, [5] * 20).cached_tokens for _ in range(2)] == [0, 0]
    assert cache.nbytes == held_bytes(cache) == 0
    with pytest.raises(UserError, match="0 bytes"):
        PrefixCache(made.session, 0)
    with pytest.raises(EngineError, match="the prefix cache needs 1048576 TiB"):
        PrefixCache(made.session, 1 << 60)


def no_gpu_memory(slot: int) -> None:
    raise torch.OutOfMemoryError("full")


def no_cpu_memory(slot: int) -> None:
    torch.empty(1 << 60)


@pytest.mark.parametrize("full", [no_gpu_memory, no_cpu_memory])
def test_a_device_without_memory_loses_the_cache_and_no_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, full: Any
) -> None:
    made, cache = caching(engine)
    ask(made, [5] * 20)
    assert cache.nbytes > 0
    monkeypatch.setattr(made.session, "slot_cursors", full)
    asked = ask(made, [6] * 20)
    assert asked.tokens == alone(engine, 0, asked.prompt, max_tokens=6).tokens
    assert cache.nbytes == held_bytes(cache) == 0


def test_other_faults_of_the_cache_are_not_hidden(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = caching(engine)

    def broken(slot: int) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(made.session, "slot_cursors", broken)
    made.submit(request(engine, 0, [6] * 20, max_tokens=6))
    (ended,) = finish(made)
    assert str(ended.error) == "something else"


@pytest.mark.parametrize(("kind", "time_slice"), [("plain", None), ("ngram", 2), ("mtp", 3), ("draft_model", 5)])
def test_random_traffic_with_common_prefixes(engine: Engine, kind: str, time_slice: int | None) -> None:
    """A cache that always evicts, prompts that part anywhere, preemptions and cancellations: results as if alone.

    Some callers draft what another text said behind the same token, which may be right at first.
    """
    choose = random.Random(kind)
    made, cache = caching(engine, kind, max_bytes=120_000, time_slice=time_slice)
    stems = [[choose.randint(2, 200) for _ in range(32)] for _ in range(3)]
    asked: dict[int, Request] = {}
    #: What was said behind a token, in another text.
    known: dict[int, list[int]] = {}
    while len(asked) < REQUESTS // 2 or made.busy:
        if len(asked) < REQUESTS // 2 and choose.random() < 0.6:
            prompt = choose.choice(stems)[: choose.randint(1, 32)] + [
                choose.randint(2, 200) for _ in range(choose.randint(1, 6))
            ]
            drafts = said[: choose.randint(0, 12)] if (said := known.get(prompt[-1])) else []
            asked[len(asked)] = one = request(
                engine, len(asked), prompt, max_tokens=choose.randint(1, 12), drafts=drafts
            )
            made.submit(one)
        if made.running and choose.random() < 0.2:
            made.preempt(choose.choice(list(made.running.values())).request.request_id)
        if asked and choose.random() < 0.05:
            made.cancel(choose.choice(list(asked)))
        assert not [update for update in made.step() if update.error]
        known |= {one.prompt[-1]: one.tokens for one in asked.values() if one.finish_reason is not None}
        assert cache.nbytes == held_bytes(cache) <= cache.max_bytes
    assert cache.statistics.hits > 200
    assert cache.statistics.evictions > 5
    for one in asked.values():
        expected = alone(engine, 0, one.prompt, max_tokens=one.limit)
        assert one.tokens == expected.tokens[: len(one.tokens)]
        assert one.finish_reason == "cancelled" or len(one.tokens) == len(expected.tokens)


def test_llm_and_command_keep_prefixes(engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chunk, llm = engine.config.prefill_chunk, LLM(engine.folder, prefix_cache_bytes=PLENTY, time_slice=4)
    prompt = [7] * (2 * chunk + 3)
    outputs = [llm.generate(prompt, SamplingParams(max_tokens=5, end_id=-1)) for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 2 * chunk]  # type: ignore[union-attr]
    assert outputs[0].outputs == outputs[1].outputs  # type: ignore[union-attr]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": prompt}) + "\n" for _ in range(6)))
    command = ["generate", "--engine_dir", str(engine.folder), "--input_file", str(rows), "--max_output_len", "5"]
    assert main([*command, "--end_id", "-1"]) == 0
    plain = capsys.readouterr()
    assert main([*command, "--end_id", "-1", "--prefix_cache_gib", "0.1"]) == 0
    cached = capsys.readouterr()
    assert cached.out == plain.out
    assert f"{4 * chunk} of {6 * len(prompt)} prompt tokens came from the prefix cache" in " ".join(cached.err.split())
    assert main([*command, "--prefix_cache_gib", "-1"]) != 0
    assert "give a number of GiB" in " ".join(capsys.readouterr().err.split())
