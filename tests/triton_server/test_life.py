"""The life of a server: starting, stopping, restarting, failing; speculation and several ranks."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from served_engine import write_engine
from served_ranks import (
    LONG_OUTPUT,
    OUTPUT_TOKENS,
    PROMPTS,
    Text,
    check_end,
    check_interfaces,
    check_lost_rank,
    check_lost_rank_of_a_stuck_model,
    gone,
)
from serving import PATIENCE, Stream, ask, serving

from trtllm_replayssm.cli.main import main
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("server_package")
#: A prompt that repeats itself, so that its n-grams are worth something.
PROMPT = [65, 66, 67, 68] * 6
ASKED = {"input_ids": PROMPT, "request_output_len": 60}


def test_speculation_stopping_and_restarting(engine: Path, llm: LLM) -> None:
    """Greedy tokens stay the same; a signal ends everything, and the next server has the same ports."""
    wanted = llm.generate(PROMPT, SamplingParams(max_tokens=60)).outputs[0].token_ids  # type: ignore[union-attr]
    options = ("--speculative_decoding_mode", "ngram", "--max_draft_len", "2")
    with serving(engine, *options) as served:
        answer = ask(served, ASKED | {"return_perf_metrics": True})
        assert answer.tokens == wanted
        drafted = int(answer.last["total_draft_tokens"].item())
        metrics = served.settled()
        assert metrics["replayssm_draft_tokens_total"] == drafted > 0
        accepted = metrics["replayssm_accepted_draft_tokens_total"]
        assert metrics["replayssm_draft_acceptance_rate"] == pytest.approx(accepted / drafted)
        family, ports = served.family(), served.ports
        running = Stream(served, ASKED | {"request_output_len": LONG_OUTPUT, "streaming": True})
        assert running.take()
        assert served.stop(signal.SIGTERM) == 0
        assert "stopped" in served.said and "error" not in served.said
        assert gone(family, f"trtllm_replayssm_{served.process.pid}_")
        # What runs when a server is stopped is finished when it can be in time, or ends with an error.
        while running.take():
            pass
        assert running.answer.error or running.answer.finish_reason
    with serving(engine, *options, ports=ports) as served:
        assert served.ports == ports
        assert ask(served, ASKED).tokens == wanted
        family = served.family()
        assert served.stop(signal.SIGINT) == 0
        assert gone(family, f"trtllm_replayssm_{served.process.pid}_")


def test_two_ranks(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks follow the same requests; when one is lost, clients are told, and the server starts again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine = write_engine(tmp_path / "two", tp_size=2)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, SamplingParams(max_tokens=OUTPUT_TOKENS))]
    expected = [Text(prompt, output.token_ids, output.text) for prompt, output in zip(PROMPTS, outputs)]
    with serving(engine) as served:
        left = Stream(served, ASKED | {"request_output_len": LONG_OUTPUT, "streaming": True})
        left.leave()
        check_interfaces(served, "two", expected)
        check_lost_rank(served, "two", expected[0])
        check_lost_rank_of_a_stuck_model(served, "two", expected[0])
        check_end(served)
    assert not list(tmp_path.glob("trtllm-replayssm-*"))


#: Nobody's; the usual ones may be in use on a machine where tests run.
PORTS = [item for name in ("http", "grpc", "metrics", "openai") for item in (f"--{name}_port", "0")]


def refused(capsys: pytest.CaptureFixture[str], engine: Path, *options: str) -> list[str]:
    """What ``serve`` says on its way out, in this process; status 1."""
    assert main(["serve", "--engine_dir", str(engine), *PORTS, *options]) == 1
    return capsys.readouterr().err.splitlines()


def test_a_port_in_use_is_one_sentence(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, engine, "--grpc_port", str(port))
    assert said[-2:] == [
        f"error: port {port} of 127.0.0.1 cannot be used: address already in use",
        "hint: choose another with --grpc_port, or 0 for any",
    ]


def test_an_engine_that_cannot_be_loaded_is_one_sentence(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its config before anything starts; otherwise the model inside Triton says why."""
    assert "config.json" in " ".join(refused(capsys, tmp_path))
    # In a process of its own: gRPC of this one, which other tests have used, would not survive the fork.
    words = [sys.executable, "-m", "trtllm_replayssm", "serve", "--engine_dir", str(engine), *PORTS]
    done = subprocess.run(
        [*words, "--speculative_decoding_mode", "mtp"], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert done.returncode == 1
    assert "could not start" in done.stderr and "no multi-token prediction head" in done.stderr


def test_a_broken_chat_template_is_found_before_anything_starts(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    (copy / "chat_template.jinja").write_text("{% if %}")
    *_, error, hint = refused(capsys, copy, "--tritonserver", "/bin/false")
    assert error.startswith(f"error: the chat template in {copy / 'chat_template.jinja'} is broken: ")
    assert hint.startswith("hint: copy it from the model's folder again")


def test_a_program_that_is_no_server_is_one_sentence(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "could not start" in " ".join(refused(capsys, engine, "--tritonserver", "/bin/false"))
    assert "no program" in " ".join(refused(capsys, engine, "--tritonserver", "/nonexistent"))


def test_a_time_that_is_no_number_is_refused(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--startup_timeout" in refused(capsys, engine, "--startup_timeout", "nan", "--http_port", "-1")[-1]


@pytest.mark.parametrize(("seconds", "bound"), [(-1, "0 or more"), (1 << 31, "2147483647 or less")])
def test_an_exit_timeout_is_a_count(engine: Path, capsys: pytest.CaptureFixture[str], seconds: int, bound: str) -> None:
    said = refused(capsys, engine, "--exit_timeout", str(seconds))
    assert said == [f"error: --exit_timeout is {seconds}; it must be {bound}"]
