"""Parts of the served model without a server: the repository, faults inside a step, deliveries, chat templates."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from served_engine import write_engine

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.outputs import Update
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.stepping import SteppingThread
from trtllm_replayssm.triton import MODEL_FILE_VARIABLE, ranks, serving
from trtllm_replayssm.triton.asks import Ask
from trtllm_replayssm.triton.delivery import Delivery
from trtllm_replayssm.triton.openai.chat import ChatTemplate
from trtllm_replayssm.triton.options import ServingOptions
from trtllm_replayssm.triton.replies import Reply, Tensors, Times
from trtllm_replayssm.triton.repository import is_repository, write_repository
from trtllm_replayssm.triton.server import choose_ports

PATIENCE = 30


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_no_matter_of_ports(host: str) -> None:
    with pytest.raises(UserError, match=f"^--host {host} cannot be listened at: ") as caught:
        choose_ports(host, {"http": 0})
    assert "0.0.0.0" in caught.value.hint


# ---- the repository --------------------------------------------------------------------------------------------------


def config(repository: Path, model: str) -> Any:
    """config.pbtxt as Triton reads it."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), messages.ModelConfig())


def test_repository_is_complete(engine: Path, tmp_path: Path) -> None:
    options = ServingOptions(str(engine), "cpu", speculative_decoding_mode="ngram", max_draft_len=2, time_slice=9)
    write_repository(options, tmp_path / "models")
    tokens, text = config(tmp_path / "models", "tensorrt_llm"), config(tmp_path / "models", "ensemble")
    assert (tokens.backend, text.platform, tokens.instance_group[0].count) == ("python", "ensemble", 1)
    parameters = {name: value.string_value for name, value in tokens.parameters.items()}
    assert ServingOptions.from_parameters(parameters) == options
    # What the text model maps exists on both sides, with the same type and shape.
    (step,) = text.ensemble_scheduling.step
    for mapping, ours, theirs in (
        (step.input_map, text.input, tokens.input),
        (step.output_map, text.output, tokens.output),
    ):
        outer, inner = ({t.name: (t.data_type, list(t.dims)) for t in side} for side in (ours, theirs))
        assert {outer[value] == inner[key] for key, value in mapping.items()} == {True}
        assert set(mapping.values()) == set(outer)


def test_repository_with_its_engine_can_be_moved(engine: Path, tmp_path: Path) -> None:
    write_repository(ServingOptions(str(engine)), tmp_path / "models", copy_engine=True)
    moved = (tmp_path / "models").rename(tmp_path / 'a "quoted" place')
    parameters = config(moved, "tensorrt_llm").parameters
    options = ServingOptions.from_parameters({name: value.string_value for name, value in parameters.items()})
    llm = options.load(moved / "tensorrt_llm" / "1")
    assert llm.generate([65], SamplingParams(max_tokens=2)).outputs[0].token_ids  # type: ignore[union-attr]


def test_no_room_for_the_engine_of_a_repository(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before anything is copied, and where the disk fills up meanwhile, in one sentence."""
    options, models = ServingOptions(str(engine)), tmp_path / "models"
    size = sum(path.stat().st_size for path in engine.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size - 1))
        with pytest.raises(UserError, match=r"models needs .*, and its disk has .* left"):
            write_repository(options, models, copy_engine=True)
        write_repository(options, models)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy2", fill_up)
        with pytest.raises(UserError, match=r"models cannot be written: No space left on device$") as caught:
            write_repository(options, models, copy_engine=True)
    assert "free some space" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["models"] and is_repository(models)


def fill_up(source: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(source))


def test_repository_replaces_only_its_own(engine: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    write_repository(ServingOptions(str(engine)), models)
    write_repository(ServingOptions(str(engine), max_draft_len=1), models)
    (models / "other_model").mkdir()
    with pytest.raises(UserError, match="is not empty"):
        write_repository(ServingOptions(str(engine)), models)
    with pytest.raises(EngineError):
        write_repository(ServingOptions(str(tmp_path)), tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="no FP8 matrices with a scale a row"):
        write_repository(ServingOptions(str(engine), scaled_matmul=True), tmp_path / "elsewhere")
    with pytest.raises(UserError, match="max_draft_len is 4; the engine was built for 3 drafts"):
        write_repository(
            ServingOptions(str(engine), speculative_decoding_mode="ngram", max_draft_len=4), tmp_path / "elsewhere"
        )
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, "does not say engine_dir"),
        ({"engine_dir": "e", "engin": "x"}, "unknown parameter engin"),
        ({"engine_dir": "e", "max_draft_len": "x"}, "max_draft_len of config.pbtxt is 'x'"),
        ({"engine_dir": "e", "exclude_input_in_output": "perhaps"}, "is 'perhaps'"),
    ],
)
def test_parameters_that_cannot_be(parameters: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        ServingOptions.from_parameters(parameters)


# ---- keeping a server ------------------------------------------------------------------------------------------------


class Mortal:
    """A server that ends as soon as it is started, a few times."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.started = deaths, 1

    def lives(self) -> bool:
        return self.started > self.deaths

    def restart(self, seconds: float, stopped: Callable[[], bool]) -> None:
        self.started += 1

    def reason(self) -> str:
        return "no memory"


@pytest.mark.parametrize("deaths", [3, 4])
def test_a_server_that_does_not_live_is_started_three_times_more(monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    monkeypatch.setattr(serving, "WATCH_PERIOD", 0.01)
    server, stop = Mortal(deaths), asyncio.Event()

    async def until_it_lives() -> None:
        while not server.lives():
            await asyncio.sleep(0.01)
        stop.set()

    async def scenario() -> None:
        waiting = asyncio.create_task(until_it_lives())
        try:
            await serving.watch(server, stop, PATIENCE)  # type: ignore[arg-type]
        finally:
            waiting.cancel()

    if deaths == 3:
        asyncio.run(scenario())
        assert server.started == 4
    else:
        with pytest.raises(EngineError, match="3 times and ended within 10 seconds each time: no memory"):
            asyncio.run(scenario())


# ---- ranks -----------------------------------------------------------------------------------------------------------


def end_slowly() -> None:
    """As a process does whose GPU takes its time: everything is closed long before there is an exit code."""
    os.closerange(3, 1024)
    time.sleep(1)
    os._exit(3)


def test_a_rank_that_ends_slowly_is_missed() -> None:
    process = mp.get_context("spawn").Process(target=end_slowly)
    process.start()
    reader, writer = mp.Pipe(duplex=False)
    writer.close()
    said: list[str] = []
    ranks.Ranks([process], [], [reader], "no folder").watch(lambda error: said.append(str(error)))
    assert said == ["rank 1 has ended with status 3"]


@pytest.mark.parametrize("who", ["another", "rank 0"])
def test_ranks_that_do_not_meet_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """There is no GPU of that number, which the other rank finds out, or rank 0 fails by itself."""
    engine, lost = write_engine(tmp_path / "two", tp_size=2), threading.Event()
    monkeypatch.delenv(MODEL_FILE_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left: list[list[Path]] = []

    def told(error: Exception) -> None:
        left.append(list(tmp_path.glob("trtllm-replayssm-*")))
        lost.set()

    def join(*given: Any) -> None:
        assert list(tmp_path.glob("trtllm-replayssm-*"))
        if who == "rank 0":
            raise EngineError("no GPU")
        assert lost.wait(PATIENCE)
        raise EngineError("the other rank is gone")

    monkeypatch.setattr(ranks, "join_group", join)
    with pytest.raises(EngineError, match=r"no GPU|is gone"):
        ranks.Ranks.start(ServingOptions(str(engine), "cuda:99"), tmp_path, told)
    assert left == ([[]] if who == "another" else [])
    assert not list(tmp_path.glob("trtllm-replayssm-*"))


# ---- faults inside a step --------------------------------------------------------------------------------------------


class Inbox:
    """Receives the updates of one request."""

    def __init__(self) -> None:
        self.updates: queue.Queue[Update] = queue.Queue()

    def end(self) -> Update:
        while not (update := self.updates.get(timeout=PATIENCE)).finished:
            pass
        return update


def submit(llm: LLM, stepping: SteppingThread, name: int, count: int) -> Inbox:
    inbox = Inbox()
    stepping.submit(llm.request(name, None, [65 + name], SamplingParams(max_tokens=count)), inbox.updates.put)
    return inbox


def test_out_of_memory_in_a_step_ends_its_requests_only(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were in the step get the error; those that waited run in the slots that it left."""
    llm = LLM(engine, device="cpu")
    genuine, calls = llm.session.step, iter(range(1000))

    def step(*args: Any, **values: Any) -> Any:
        if next(calls) == 4:
            raise torch.OutOfMemoryError("no memory left")
        return genuine(*args, **values)

    monkeypatch.setattr(llm.session, "step", step)
    stepping = SteppingThread(llm.scheduler)
    inboxes = [submit(llm, stepping, name, 12) for name in range(9)]
    assert all(inbox.end().error is not None for inbox in inboxes)  # The thread does not run yet.
    stepping.start()
    inboxes = [submit(llm, stepping, name, 12) for name in range(9)]
    ends = [inbox.end() for inbox in inboxes]
    failed = [isinstance(end.error, torch.OutOfMemoryError) for end in ends]
    assert 1 <= sum(failed) <= 6
    monkeypatch.undo()
    fresh = LLM(engine, device="cpu")
    for name, end in enumerate(ends):
        if end.output is not None:
            wanted = fresh.generate([65 + name], SamplingParams(max_tokens=12)).outputs[0]  # type: ignore[union-attr]
            assert end.output.token_ids == wanted.token_ids
    assert not llm.scheduler.running
    stepping.close()


def test_a_step_that_fails_as_a_whole_ends_all_and_goes_on(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(engine, device="cpu")
    stepping = SteppingThread(llm.scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "admit", lambda: 1 // 0)
        stepping.start()
        ends = [inbox.end() for inbox in [submit(llm, stepping, name, 4) for name in range(8)]]
        assert all(isinstance(end.error, ZeroDivisionError) for end in ends)
    assert submit(llm, stepping, 0, 4).end().output is not None
    stepping.close()
    assert isinstance(submit(llm, stepping, 1, 4).end().error, UserError)


def test_an_order_that_fails_does_not_swallow_those_behind_it(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that came in with it are run or told; none waits for ever."""
    llm = LLM(engine, device="cpu")
    stepping, submitted = SteppingThread(llm.scheduler), llm.scheduler.submit

    def submit_or_fail(request: Any) -> None:
        if request.request_id == 1:
            raise ZeroDivisionError
        submitted(request)

    monkeypatch.setattr(llm.scheduler, "submit", submit_or_fail)
    # As if the thread were in the middle of a step while these come in.
    stepping.ended = None
    inboxes = [submit(llm, stepping, name, 4) for name in range(3)]
    stepping.start()
    ends = [inbox.end() for inbox in inboxes]
    assert [type(end.error) for end in ends] == [ZeroDivisionError, ZeroDivisionError, type(None)]
    stepping.close()


def test_a_scheduler_that_cannot_go_on_is_given_up(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told = LLM(engine, device="cpu"), Inbox()
    stepping = SteppingThread(llm.scheduler, lost=lambda error: told.updates.put(Update(0, [], "", error=error)))
    monkeypatch.setattr(llm.scheduler, "admit", lambda: 1 // 0)
    stepping.start()
    assert isinstance(submit(llm, stepping, 0, 4).end().error, ZeroDivisionError)
    assert isinstance(told.end().error, ZeroDivisionError)
    assert isinstance(submit(llm, stepping, 1, 4).end().error, ZeroDivisionError)
    stepping.thread.join(PATIENCE)
    assert not stepping.thread.is_alive()


# ---- deliveries ------------------------------------------------------------------------------------------------------


class SlowClient:
    """A channel that is stuck until it is freed, and then takes everything."""

    def __init__(self) -> None:
        self.free, self.stuck = threading.Event(), threading.Event()
        self.taken: list[list[int]] = []
        self.final, self.gone = threading.Event(), False

    def send(self, tensors: Tensors, final: bool) -> None:
        self.stuck.set()
        assert self.free.wait(PATIENCE)
        self.taken.append(tensors["output_ids"].reshape(-1).tolist())
        if final:
            self.final.set()

    def fail(self, error: Exception) -> None:
        self.final.set()

    def is_cancelled(self) -> bool:
        return self.gone


def delivered(llm: LLM, cancelled: list[Any], channel: SlowClient) -> tuple[Delivery, Any]:
    delivery = Delivery(cancelled.append, lambda reply, update: None, lambda: None, check_period=0.01)
    request = llm.request(0, None, [65], SamplingParams(max_tokens=9))
    delivery.add(Reply(Ask(None, [65], request.params, streaming=True), request, Times()), channel)
    delivery.start()
    return delivery, request


def test_tokens_wait_for_a_slow_client_together(llm: LLM) -> None:
    """Nothing is lost or mixed up, and whoever steps never waits."""
    channel = SlowClient()
    delivery, request = delivered(llm, [], channel)
    delivery.put(Update(0, [7], "a"))
    assert channel.stuck.wait(PATIENCE)
    for token in (8, 9, 10):
        delivery.put(Update(0, [token], "b"))
    request.finish_reason = "length"
    request.tokens = [7, 8, 9, 10]
    delivery.put(Update(0, [], "", output=request.output()))
    channel.free.set()
    assert channel.final.wait(PATIENCE)
    assert channel.taken == [[7], [8, 9, 10]]
    assert not delivery.open
    delivery.close()


def test_a_client_that_left_is_cancelled_once(llm: LLM) -> None:
    channel, cancelled = SlowClient(), []
    channel.gone = True
    channel.free.set()
    delivery, request = delivered(llm, cancelled, channel)
    request.cancel()
    threading.Event().wait(0.1)
    delivery.put(Update(0, [], "", output=request.output()))
    assert channel.final.wait(PATIENCE)
    delivery.close()
    assert cancelled == [0]


# ---- chats -----------------------------------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }}{%- for m in messages %}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}
{{ m.role }}={{ {'said': m.content} | tojson }}
{%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if thinking %}<think>{% endif %}"""


def test_what_training_marks_in_a_template_changes_nothing(tmp_path: Path) -> None:
    marked = "{%- for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(marked)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ChatTemplate(tmp_path).prompt(messages, {}) == "<a><b>"


def test_chat_templates(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "old"})
    )
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate(tmp_path)
    messages = [{"role": "user", "content": "<é>"}]
    assert template.prompt(messages, {"thinking": True}) == '<s>user={"said": "<é>"}<think>'
    with pytest.raises(UserError, match="no system"):
        template.prompt([{"role": "system", "content": "x"}], {})
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(UserError, match="refuses"):
        ChatTemplate(tmp_path).prompt(messages, {})
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"chat_template\.jinja is broken: .* \(line 1\)$") as caught:
        ChatTemplate(tmp_path)
    assert "remove it" in caught.value.hint
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ messages[0].content }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate(tmp_path).prompt(messages, {}) == "d<é>"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(tmp_path).prompt(messages, {})


def test_a_mark_of_utf_8_is_no_part_of_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a"}', encoding="utf-8-sig")
    assert ChatTemplate(tmp_path).prompt([], {}) == "a"
    (tmp_path / "chat_template.jinja").write_text("b", encoding="utf-8-sig")
    assert ChatTemplate(tmp_path).prompt([], {}) == "b"


def test_names_of_templates_are_texts(tmp_path: Path) -> None:
    named = [{"name": ["a"], "template": "a"}, {"name": "default", "template": "b"}, {"template": "c"}, "d"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate(tmp_path).prompt([], {}) == "b"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", b'{"bos_token": {"id": 1}}'),
        ("tokenizer_config.json", b'{"bos_token"'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("chat_template.jinja", b"{{ nothing"),
        ("chat_template.jinja", b"{% continue %}"),
        ("chat_template.jinja", b"{% if a %}" * 3000 + b"{% endif %}" * 3000),
        ("chat_template.jinja", b"{{ " + b"9" * 5000 + b" }}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_files_of_a_chat_that_are_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    """The sentence names the file, and the hint says what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        ChatTemplate(tmp_path)
    assert caught.value.hint
