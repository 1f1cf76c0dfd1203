"""Requests that fail, and steps that fail: nobody else is hurt, and nothing that was said is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import synthetic
import torch
from scheduling import MODEL, OPTIONS, alone, finish, request, scheduler

from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.speculation.drawing import Drawing
from trtllm_replayssm.runtime.step_input import StepInput


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("scheduler") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


@pytest.mark.parametrize("where", ["prefill", "decode", "commit"])
def test_an_exception_ends_those_it_hit_and_no_one_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    made = scheduler(engine, "ngram")
    session = made.session
    early = [request(engine, name, [2 + name] * 5, max_tokens=25) for name in range(2)]
    late = [request(engine, name, [2 + name] * 25, max_tokens=9) for name in range(2, 7)]
    for one in early:
        made.submit(one)
    for _ in range(5):
        made.step()
    for one in late:
        made.submit(one)
    step, commit = session.step, session.commit

    def failing_step(ids: torch.Tensor, first: int, lengths: Any, modes: Any, *rest: Any) -> torch.Tensor:
        logits = step(ids, first, lengths, modes, *rest)
        if (int(modes[0]) == 2) == (where == "prefill"):
            raise torch.OutOfMemoryError("no memory")
        return logits

    def failing_commit(first: int, accepted: Any) -> None:
        if max(accepted) < 8:
            raise RuntimeError("lost")
        commit(first, accepted)

    if where == "commit":
        monkeypatch.setattr(session, "commit", failing_commit)
    else:
        monkeypatch.setattr(session, "step", failing_step)
    updates = made.step()
    monkeypatch.undo()
    failed = {u.request_id for u in updates if u.error is not None}
    assert failed == ({2, 3} if where == "prefill" else {0, 1})
    updates = finish(made)
    assert not any(u.error for u in updates)
    for one in (*early, *late):
        if one.request_id not in failed:
            assert one.tokens == alone(engine, 0, one.prompt, max_tokens=one.limit).tokens
    made.submit(again := request(engine, 9, [3] * 9, max_tokens=9))
    finish(made)
    assert again.tokens == alone(engine, 0, again.prompt, max_tokens=9).tokens


@pytest.mark.parametrize(
    ("kind", "what"), [("plain", "launcher.decode"), ("ngram", "launcher.decode"), ("mtp", "drafter.observe")]
)
@pytest.mark.parametrize("how", ["token", "string"])
def test_a_step_that_fails_takes_nothing_that_was_said_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, what: str, how: str
) -> None:
    """Whichever step fails: tokens before it reach the client, and a text that ended with them has ended well."""
    free = alone(engine, 0, [4], max_tokens=8)
    assert len(free.text) > 2
    end: dict[str, Any] = {"stop_token_ids": free.tokens[-1:]} if how == "token" else {"stop": free.text[-2:]}
    wanted = alone(engine, 0, [4], max_tokens=30, **end)
    assert wanted.finish_reason == "stop"
    whole = 0
    for good in range(12):
        made = scheduler(engine, kind)
        asked = [request(engine, 0, [4], max_tokens=30, **end), request(engine, 1, [9], max_tokens=60)]
        for one in asked:
            made.submit(one)
        owner, name = getattr(made, what.split(".")[0]), what.split(".")[1]
        left = [getattr(owner, name)] * good

        def failing(*given: Any, left: list[Any] = left) -> Any:
            if not left:
                raise torch.OutOfMemoryError("no memory")
            return left.pop()(*given)

        monkeypatch.setattr(owner, name, failing)
        updates = finish(made)
        errors = {u.request_id: u.error for u in updates if u.finished}
        assert errors[1] is not None
        said = [token for u in updates if u.request_id == 0 for token in u.token_ids]
        if errors[0] is None:
            whole += 1
            assert (said, asked[0].text, asked[0].finish_reason) == (wanted.tokens, wanted.text, "stop")
        else:
            # One of the prompt, and one or more of each step that went well.
            assert 1 + good <= len(said) < len(wanted.tokens)
            assert said == wanted.tokens[: len(said)]
    assert 0 < whole < 12


def test_a_prompt_that_fails_in_the_device_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot stays empty between two that go on, and what it left there keeps them from nothing."""
    made = scheduler(engine)
    asked = [request(engine, name, [2 + name] * (30 if name == 1 else 1), max_tokens=20) for name in range(3)]
    for one in asked:
        made.submit(one)
    made.step()
    run = made.session.steps.run

    def failing(given: StepInput, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if int(given.modes[0]) == RowMode.ABSORB:
            raise torch.OutOfMemoryError("no memory")
        return run(given, *rest)

    monkeypatch.setattr(made.session.steps, "run", failing)
    errors = {u.request_id: u.error for u in finish(made) if u.finished}
    assert {name for name, error in errors.items() if error is not None} == {1}
    for one in (asked[0], asked[2]):
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=20).tokens


def test_a_request_that_cannot_be_saved_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for the one that is to make room; it ends, and the slot goes to the one that waits."""
    made = scheduler(engine, time_slice=3)
    asked = [request(engine, name, [2 + name], max_tokens=9) for name in range(5)]
    for one in asked:
        made.submit(one)
    save = made.session.save

    def failing_save(slot: int, device: Any) -> Any:
        if made.running[slot].request.request_id == 0:
            raise MemoryError("no memory")
        return save(slot, device)

    monkeypatch.setattr(made.session, "save", failing_save)
    errors = {u.request_id: u.error for u in finish(made) if u.finished}
    assert {name for name, error in errors.items() if isinstance(error, MemoryError)} == {0}
    for one in asked[1:]:
        assert errors[one.request_id] is None
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=9).tokens


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize(("mode", "before"), [(RowMode.ABSORB, 0), (RowMode.DECODE, 1)], ids=["prompt", "decode"])
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("plain", {}),
        ("plain", {"temperature": 0.7, "top_k": 5}),
        ("ngram", {}),
        ("mtp", {}),
        ("draft_model", {}),
        ("draft_model", {"temperature": 0.7}),
    ],
)
def test_logits_that_are_no_numbers_are_an_error(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    sampling: dict[str, Any],
    mode: RowMode,
    before: int,
    value: float,
) -> None:
    """Of that request alone, behind its prompt or later, which gets no token from them; its slot serves the next one."""

    def submitted(made: Scheduler) -> list[Request]:
        asked = [request(engine, name, [2 + name] * 5, max_tokens=9, **sampling) for name in range(3)]
        for one in asked:
            made.submit(one)
        return asked

    sound = scheduler(engine, kind)
    wanted = submitted(sound)
    finish(sound)
    made = scheduler(engine, kind)
    asked, run = submitted(made), made.launcher.run
    damaged_steps = 0

    def damaged(rows: Any, kind: RowMode) -> torch.Tensor:
        nonlocal damaged_steps
        logits = run(rows, kind)
        if kind == mode and not damaged_steps:
            damaged_steps = 1
            logits[1 - rows.first, :, 7] = value
        return logits

    monkeypatch.setattr(made.launcher, "run", damaged)
    updates = finish(made)
    assert damaged_steps
    monkeypatch.undo()
    errors = {u.request_id: u.error for u in updates if u.finished}
    assert isinstance(errors[1], EngineError) and "no numbers" in str(errors[1])
    assert asked[1].tokens == wanted[1].tokens[:before]
    made.submit(again := request(engine, 0, wanted[0].prompt, max_tokens=9, **sampling))
    finish(made)
    assert [one.tokens for one in (asked[0], asked[2], again)] == [wanted[i].tokens for i in (0, 2, 0)]


def test_what_is_computed_behind_the_end_of_a_text_does_not_matter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right go beyond the token that ends a text; plain steps would never come there."""
    free = alone(engine, 0, [3] * 5, max_tokens=9).tokens
    sampling = {"max_tokens": 9, "end_id": free[2]}
    wanted = alone(engine, 0, [3] * 5, **sampling)
    made = scheduler(engine)
    made.submit(asked := request(engine, 0, [3] * 5, drafts=tuple(free), **sampling))
    run = made.launcher.run

    def damaged(rows: Any, mode: RowMode) -> torch.Tensor:
        logits = run(rows, mode)
        logits[:, 2:] = float("nan")
        return logits

    monkeypatch.setattr(made.launcher, "run", damaged)
    (last,) = [update for update in finish(made) if update.finished]
    assert last.error is None and asked.tokens == wanted.tokens == free[:3]
    assert asked.statistics.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["mtp", "draft_model"])
def test_a_draft_model_whose_logits_are_no_numbers_drafts_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, sampling: dict[str, Any]
) -> None:
    """And spoils no text."""
    add = Drawing.add
    monkeypatch.setattr(
        Drawing, "add", lambda self, logits: add(self, {slot: x + float("nan") for slot, x in logits.items()})
    )
    made = scheduler(engine, kind)
    asked = [request(engine, name, [2 + name] * 5, max_tokens=9, **sampling) for name in range(3)]
    for one in asked:
        made.submit(one)
    errors = [update.error for update in finish(made) if update.finished]
    assert errors == [None] * 3 and made.statistics.num_draft_tokens == 0
    for one in asked:
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=9, **sampling).tokens


def test_a_request_that_fails_by_itself_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler(engine, "mtp")
    asked = [request(engine, name, [2 + name] * 5, max_tokens=9) for name in range(3)]
    for one in asked:
        made.submit(one)
    monkeypatch.setattr(asked[1], "tell", lambda *kept: 1 // 0)
    errors = {u.request_id: u.error for u in finish(made) if u.finished}
    assert {name for name, error in errors.items() if error is not None} == {1}
    for one in (asked[0], asked[2]):
        assert one.tokens == alone(engine, 0, one.prompt, max_tokens=9).tokens
