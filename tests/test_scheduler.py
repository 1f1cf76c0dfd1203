"""In-flight batching: any mixture of arrivals, cancellations and preemptions gives what each request gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from scheduling import MODEL, OPTIONS, REQUESTS, alone, finish, request, scheduler

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.flight import Flight
from trtllm_replayssm.runtime.outputs import Update
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("scheduler") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


# ---- random traffic --------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Random requests, and what is done to them while they run."""

    engine: Engine
    random: random.Random
    asked: dict[int, Request] = field(default_factory=dict)
    params: dict[int, dict[str, Any]] = field(default_factory=dict)
    updates: dict[int, list[Update]] = field(default_factory=dict)
    preempted: int = 0

    def arrive(self, made: Scheduler) -> None:
        choose, name = self.random, len(self.asked)
        prompt = [choose.randint(2, 200) for _ in range(choose.randint(1, 30))]
        if choose.random() < 0.5:
            prompt = (prompt[:4] * 8)[: len(prompt)]
        params: dict[str, Any] = {"max_tokens": choose.randint(1, 30)}
        if choose.random() < 0.3:
            params |= {"temperature": choose.uniform(0.5, 2), "top_k": choose.choice([0, 5]), "seed": name}
        if choose.random() < 0.3:
            params["stop_token_ids"] = [choose.randint(2, 257) for _ in range(20)]
        if choose.random() < 0.3:
            params |= {"repetition_penalty": choose.uniform(0.8, 1.5), "frequency_penalty": choose.uniform(-0.5, 1)}
        if choose.random() < 0.3:
            params["min_tokens"] = choose.randint(1, params["max_tokens"])
        self.asked[name], self.params[name] = request(self.engine, name, prompt, **params), params
        made.submit(self.asked[name])

    def disturb(self, made: Scheduler) -> None:
        if self.asked and self.random.random() < 0.1:
            made.cancel(self.random.choice(list(self.asked)))
        if made.running and self.random.random() < 0.2:
            job = self.random.choice(list(made.running.values()))
            self.preempted += made.preempt(job.request.request_id)

    def step(self, made: Scheduler) -> None:
        for update in made.step():
            assert update.error is None
            self.updates.setdefault(int(update.request_id), []).append(update)


@pytest.mark.parametrize(
    ("kind", "time_slice"), [("plain", None), ("plain", 5), ("ngram", None), ("mtp", 4), ("draft_model", None)]
)
def test_random_traffic_equals_each_request_alone(engine: Engine, kind: str, time_slice: int | None) -> None:
    """Arrivals, cancellations and preemptions at random; sampled requests too, where drafts leave their draws alone."""
    made = scheduler(engine, kind, time_slice=time_slice)
    traffic = Traffic(engine, random.Random(f"{kind} {time_slice}"))
    count = REQUESTS if kind == "plain" else REQUESTS // 2
    while len(traffic.asked) < count or made.busy:
        for _ in range(traffic.random.choice([0, 0, 1, 1, 3])):
            if len(traffic.asked) < count:
                traffic.arrive(made)
        traffic.disturb(made)
        traffic.step(made)
    assert not made.running
    assert not made.jobs
    assert traffic.preempted > count / 10
    ended = {"stop": 0, "length": 0, "cancelled": 0}
    for name, asked in traffic.asked.items():
        assert asked.finish_reason is not None
        ended[asked.finish_reason] += 1
        updates = traffic.updates[name]
        assert [u.finished for u in updates] == [False] * (len(updates) - 1) + [True]
        assert [token for u in updates for token in u.token_ids] == asked.tokens
        assert "".join(u.text for u in updates) == asked.text
        if kind in ("mtp", "draft_model") and not asked.params.greedy:
            continue  # drawn drafts keep the distribution, not the draw
        expected = alone(engine, name, asked.prompt, **traffic.params[name])
        if asked.finish_reason == "cancelled":
            assert asked.tokens == expected.tokens[: len(asked.tokens)]
        else:
            assert (asked.tokens, asked.text, asked.finish_reason, asked.stop_reason) == (
                *(expected.tokens, expected.text, expected.finish_reason, expected.stop_reason),
            )
    assert min(ended.values()) > 0


def test_no_step_is_larger_than_the_engine_allows_and_prompts_hold_nobody_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that decodes gets a token in every step, while a long prompt comes in chunk by chunk."""
    made, counts = scheduler(engine, "ngram"), []
    step = made.session.step

    def counted(ids: torch.Tensor, first: int, lengths: list[int], modes: Any, active: list[bool], *rest: Any) -> Any:
        counts.append(sum(length for length, live in zip(lengths, active) if live))
        return step(ids, first, lengths, modes, active, *rest)

    monkeypatch.setattr(made.session, "step", counted)
    made.submit(early := request(engine, 0, [2], max_tokens=30))
    made.step()
    for name in range(1, 4):
        made.submit(request(engine, name, [3 + name] * 40, max_tokens=20))
    for chunk in range(1, 6):
        before = len(early.tokens)
        counts.clear()
        made.step()
        assert len(early.tokens) > before
        assert len(counts) == 2
        assert 3 * 8 < sum(counts) <= engine.config.max_num_tokens
        assert [job.prefilled for job in list(made.running.values())[1:]] == [8 * chunk] * 3
    made.step()
    assert all(not job.prefilling for job in made.running.values())
    while made.busy:
        counts.clear()
        made.step()
        assert sum(counts) <= engine.config.max_num_tokens


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("plain", {}),
        ("ngram", {}),
        ("mtp", {}),
        ("draft_model", {}),
        # Drafts that are drawn keep the distribution, not the draw; those of the caller and of n-grams are not drawn.
        ("plain", {"temperature": 1.3, "seed": 5}),
        ("ngram", {"temperature": 1.3, "seed": 5}),
    ],
)
def test_drafts_of_the_caller_save_steps_and_change_no_token(engine: Engine, kind: str, params: dict[str, Any]) -> None:
    """As far as they are right, they are taken 4 at a time; what is wrong, or too much, has no effect."""
    params = params | {"max_tokens": 21}
    prompts = [[3 + name] * (2 + 9 * name) for name in range(3)]
    wanted = [alone(engine, 0, prompt, **params).tokens for prompt in prompts]
    right, half, wrong = (
        [*wanted[0], 7, 7],
        [*wanted[1][:10], (wanted[1][10] + 1) % 250, *wanted[1][11:]],
        [(wanted[2][0] + 1) % 250] * 30,
    )
    made = scheduler(engine, kind)
    asked = [
        request(engine, name, prompt, drafts=drafts, **params)
        for name, (prompt, drafts) in enumerate(zip(prompts, (right, half, wrong)))
    ]
    for one in asked:
        made.submit(one)
    for _ in range(2):
        made.step()
    made.preempt(0)
    finish(made)
    assert [one.tokens for one in asked] == wanted
    # The prompt gives the first token, five steps the other 20.
    assert (asked[0].statistics.num_steps, asked[0].statistics.num_accepted_draft_tokens) == (5, 15)
    assert asked[1].statistics.num_accepted_draft_tokens >= 7
    if kind == "plain":
        # 1 + 4 + 4 tokens, one and the first wrong draft's place, and 10 more.
        assert (asked[1].statistics.num_steps, asked[1].statistics.num_draft_tokens) == (13, 9)
        assert (asked[2].statistics.num_steps, asked[2].statistics.num_draft_tokens) == (20, 0)


def test_drafts_behind_the_end_do_not_count(engine: Engine) -> None:
    """The model agrees with them, but they are no tokens of the request."""
    free = alone(engine, 0, [4], max_tokens=10)
    made = scheduler(engine)
    made.submit(one := request(engine, 0, [4], max_tokens=30, drafts=free.tokens, stop_token_ids=[free.tokens[2]]))
    finish(made)
    assert one.finish_reason == "stop"
    for counts in (one.statistics, made.statistics):
        # The prompt gives the first token.
        assert counts.num_output_tokens == len(one.tokens) - 1
        assert counts.num_accepted_draft_tokens == counts.num_output_tokens - counts.num_steps
    assert made.statistics.num_draft_tokens == 3


def test_drafts_that_cannot_be_are_refused(engine: Engine, tmp_path: Path) -> None:
    made = scheduler(engine)
    with pytest.raises(UserError, match=r"the draft of prompt 0 holds token id 9999; the model has ids 0 to"):
        made.submit(request(engine, 0, [2], drafts=[3, 9999]))
    with pytest.raises(UserError, match="holds token id -1"):
        made.submit(request(engine, 0, [2], drafts=[3, -1]))
    plain = synthetic.write_engine(tmp_path / "plain", MODEL, replace(OPTIONS, max_draft_len=0), text=True)
    with pytest.raises(UserError, match="built without room for drafts"):
        scheduler(synthetic.load(plain)).submit(request(engine, 0, [2], drafts=[3]))


# ---- host and device -------------------------------------------------------------------------------------------------


def recorded(made: Scheduler, asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: steps of the session, and tokens whose texts are made."""
    events: list[str] = []
    step = made.session.step

    def stepping(ids: torch.Tensor, first: int, lengths: Any, modes: list[RowMode], *rest: Any) -> torch.Tensor:
        events.append("prefill" if modes[0] == RowMode.ABSORB else "decode")
        return step(ids, first, lengths, modes, *rest)

    def telling(one: Request) -> Any:
        tell = one.tell

        def recording(*given: Any) -> str:
            events.append(f"tell {one.request_id}")
            return tell(*given)

        return recording

    monkeypatch.setattr(made.session, "step", stepping)
    for one in asked:
        monkeypatch.setattr(one, "tell", telling(one))
    return events


def test_the_next_step_is_launched_before_the_last_tokens_are_looked_at(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = scheduler(engine)
    asked = [request(engine, name, [2 + name], max_tokens=4 - name) for name in range(2)]
    for one in asked:
        made.submit(one)
    events = recorded(made, asked, monkeypatch)
    rounds = []
    while made.busy:
        begun = len(events)
        rounds.append((events[begun:], [(u.request_id, u.token_ids) for u in made.step()]))
        rounds[-1] = events[begun:], rounds[-1][1]
    assert [happened for happened, _ in rounds] == [
        ["prefill"],
        ["decode", "tell 0", "tell 1"],
        ["decode", "tell 0", "tell 1"],
        ["decode", "tell 0", "tell 1"],
        ["tell 0"],
    ]
    for one in asked:
        assert [tokens for _, told in rounds for name, tokens in told if name == one.request_id] == [
            [token] for token in one.tokens
        ]


def test_a_request_that_turns_out_to_have_ended_costs_a_row_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stops by a token, one by a string; a third goes on, and the next two take the slots in the very same step."""
    made = scheduler(engine)
    free = alone(engine, 0, [2], max_tokens=20)
    asked = [
        request(engine, 0, [2], max_tokens=20, stop_token_ids=[free.tokens[3]]),
        request(engine, 1, [2], max_tokens=20, stop=[free.text[:2]]),
        *(request(engine, name, [5 + name], max_tokens=20) for name in range(2, 6)),
    ]
    for one in asked:
        made.submit(one)
    finish(made)
    assert asked[0].finish_reason == asked[1].finish_reason == "stop"
    assert asked[0].tokens == free.tokens[: len(asked[0].tokens)]
    for one in asked[2:]:
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=20).tokens


def test_nothing_stays_of_a_step_that_turns_out_to_be_nobodys(engine: Engine) -> None:
    end = alone(engine, 0, [2], max_tokens=4).tokens[3]
    made = scheduler(engine)
    made.submit(one := request(engine, 0, [2], max_tokens=20, stop_token_ids=[end]))
    finish(made)
    assert one.finish_reason == "stop"
    assert not (made.flights or made.untold or made.jobs)


@pytest.mark.parametrize("kind", ["ngram", "mtp", "draft_model", "given"])
def test_steps_with_drafts_wait_for_tokens_and_not_for_texts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Texts of a step are made when the next one was launched, before the host waits for it."""
    drafts = alone(engine, 0, [2], max_tokens=20).tokens
    made = scheduler(engine, "plain" if kind == "given" else kind)
    one = request(engine, 0, [2], max_tokens=20, drafts=drafts if kind == "given" else ())
    made.submit(one)
    events = recorded(made, [one], monkeypatch)
    tokens = made.launcher.tokens

    def waiting(flight: Flight) -> dict[int, list[int]]:
        events.append("wait")
        return tokens(flight)

    monkeypatch.setattr(made.launcher, "tokens", waiting)
    finish(made)
    assert one.tokens == drafts
    # One event for all texts of a step.
    brief = [event for before, event in zip(["", *events], events) if event != before]
    steps = brief.count("decode")
    assert steps < 20 if kind in ("draft_model", "given") else steps <= 20
    assert brief == ["prefill", "wait", *["decode", "tell 0", "wait"] * steps, "tell 0"]


# ---- order -----------------------------------------------------------------------------------------------------------


def test_requests_are_admitted_in_the_order_of_their_arrival(engine: Engine) -> None:
    made = scheduler(engine)
    for name in range(9):
        made.submit(request(engine, name, [2 + name], max_tokens=3 + name % 3))
    first: list[int] = []
    while made.busy:
        first += [int(u.request_id) for u in made.step() if u.request_id not in first]
    assert first == sorted(first)


def test_a_long_request_makes_room_when_its_time_is_up(engine: Engine) -> None:
    """Four that would hold their slots for 50 tokens; a fifth gets its turn after 5, and all end as if alone."""
    made = scheduler(engine, time_slice=5)
    asked = [request(engine, name, [2 + name], max_tokens=50) for name in range(5)]
    for one in asked:
        made.submit(one)
    for _ in range(8):
        made.step()
    assert asked[4].tokens
    assert any(job.saved is not None for job in made.waiting)
    finish(made)
    for one in asked:
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=50).tokens


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_nobody_makes_room_where_a_text_has_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of all four is up, and the device has chosen the token that ends one of them: its slot is room enough."""
    made = scheduler(engine, time_slice=5)
    free = alone(engine, 0, [5], max_tokens=5)
    assert free.tokens.index(free.tokens[4]) == 4
    for name in range(4):
        ends = {"stop_token_ids": free.tokens[4:]} if name == 3 else {}
        made.submit(request(engine, name, [2 + name], max_tokens=8, **ends))
    made.submit(late := request(engine, 4, [9], max_tokens=8))
    saved: list[int] = []
    monkeypatch.setattr(made.session, "save", lambda slot, device: saved.append(slot))
    finish(made)
    assert not saved
    assert late.tokens == alone(engine, 4, [9], max_tokens=8).tokens


def test_cancelled_requests_free_their_slot_and_tell_what_they_have(engine: Engine) -> None:
    made = scheduler(engine)
    for name in range(6):
        made.submit(request(engine, name, [2 + name], max_tokens=20))
    for _ in range(4):
        made.step()
    # Its fourth token is chosen, but not looked at.
    assert made.cancel(1)
    assert made.cancel(5)
    assert not made.cancel(1)
    assert not made.cancel(77)
    ended = {u.request_id: u.output for u in made.step() if u.finished}
    assert {name: (o.finish_reason, len(o.token_ids)) for name, o in ended.items() if o is not None} == {
        1: ("cancelled", 3),
        5: ("cancelled", 0),
    }
    assert 4 in [job.request.request_id for job in made.running.values()]


def test_ids_are_unique_among_those_that_run(engine: Engine) -> None:
    made = scheduler(engine)
    made.submit(request(engine, 0, [2], max_tokens=2))
    with pytest.raises(UserError, match="request 0 is running already"):
        made.submit(request(engine, 0, [3], max_tokens=2))
    finish(made)
    made.submit(request(engine, 0, [3], max_tokens=2))


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    asked = alone(engine, 0, [5, 6, 7], max_tokens=8, temperature=1.5, logprobs=2, return_generation_logits=True)
    output = asked.output()
    assert output.logprobs is not None
    assert output.generation_logits is not None
    expected = output.generation_logits.log_softmax(-1)
    assert output.cumulative_logprob == pytest.approx(
        float(sum(row[token] for row, token in zip(expected, output.token_ids)))
    )
    for row, token, found in zip(expected, output.token_ids, output.logprobs):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert found[token].rank == 1 + int((row > row[token]).sum())
        assert {1, 2} <= {entry.rank for entry in found.values()}
        assert len(found) in (2, 3)
    assert alone(engine, 0, [5], max_tokens=2, logprobs=0).output().logprobs is not None
    assert alone(engine, 0, [5], max_tokens=2).output().logprobs is None
