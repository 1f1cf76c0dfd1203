"""What clients of OpenAI's interface see when the server behind it is lost, and how a restart is ended."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import join, quote
from typing import Any

import psutil
import pytest
from processes import with_command
from served_ranks import LONG_OUTPUT, gone
from serving import PATIENCE, Served, events, post, serving

from trtllm_replayssm.triton.installation import find_server

pytestmark = pytest.mark.usefixtures("server_package")
LONG = {"model": "tiny", "prompt": "The sea", "max_tokens": LONG_OUTPUT, "temperature": 0}
#: The server's own process, and the one of its model, by what their command lines have.
SERVER, MODEL = "tritonserver --model-repository", "python_backend_stub"


def kill(served: Served, sign: str) -> None:
    """And wait until the processes have ended; Triton leaves its model's as a zombie."""
    killed = with_command(served.family(), sign)
    assert killed
    for process in killed:
        process.kill()
    deadline = time.monotonic() + PATIENCE
    while not all(map(has_ended, killed)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def check_unavailable(data: dict[str, Any]) -> None:
    error = data["error"]
    assert (error["type"], error["code"], "the engine is not there" in error["message"]) == ("server_error", 503, True)


def answer_comes(served: Served) -> None:
    url, deadline = f"http://{served.openai}/v1/completions", time.monotonic() + 2 * PATIENCE
    while (answer := post(url, LONG | {"max_tokens": 3}))[0] != 200:
        assert answer[0] == 503 and time.monotonic() < deadline
        check_unavailable(answer[1])
        time.sleep(0.1)


def health(served: Served) -> int:
    try:
        with urllib.request.urlopen(f"http://{served.openai}/health", timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


class Gate:
    """A ``tritonserver`` that starts the real one when its gate is open."""

    def __init__(self, folder: Path) -> None:
        found, self.shut, self.program = find_server(None, folder), folder / "shut", folder / "gate"
        lines = [
            "#!/bin/sh",
            f"while [ -e {quote(str(self.shut))} ]; do sleep 0.1; done",
            *(f"export {name}={quote(value)}" for name, value in found.environment.items()),
            f'exec {quote(str(found.executable))} "$@" {join(found.options)}',
        ]
        self.program.write_text("\n".join(lines))
        self.program.chmod(0o755)

    def close(self) -> None:
        self.shut.touch()

    def open(self) -> None:
        self.shut.unlink()


@pytest.mark.parametrize(
    ("lost", "reason"), [(SERVER, "it was ended by SIGKILL"), (MODEL, "the process of its model has ended")]
)
def test_clients_are_told_that_the_server_is_lost(engine: Path, tmp_path: Path, lost: str, reason: str) -> None:
    """A stream, a whole answer and requests that come meanwhile; then everything is as before."""
    gate = Gate(tmp_path)
    with serving(engine, "--tritonserver", str(gate.program)) as served, ThreadPoolExecutor(1) as pool:
        url = f"http://{served.openai}/v1/completions"
        whole = pool.submit(post, url, LONG)
        stream = events(url, LONG | {"stream": True})
        next(stream)
        served.metric_becomes("replayssm_slots_in_use", lambda slots: slots == 2)
        gate.close()
        kill(served, lost)
        assert health(served) == 503
        with pytest.raises(urllib.error.HTTPError) as caught:
            next(events(url, LONG | {"stream": True}))
        assert caught.value.code == 503 and int(caught.value.headers["Retry-After"]) > 0
        *_, last, end = stream
        check_unavailable(json.loads(last))
        assert end == "[DONE]"
        for status, data in (whole.result(), post(url, LONG)):
            assert status == 503
            check_unavailable(data)
        gate.open()
        answer_comes(served)
        assert health(served) == 200
        assert f"has ended ({reason}) and is started again" in served.said
        assert served.stop() == 0
        assert "Traceback" not in served.said and "Error handling" not in served.said


def test_clients_are_told_that_the_server_is_stopped(engine: Path) -> None:
    with serving(engine, "--exit_timeout", "0") as served, ThreadPoolExecutor(2) as pool:
        url = f"http://{served.openai}/v1/completions"
        whole = pool.submit(post, url, LONG)
        stream = events(url, LONG | {"stream": True})
        next(stream)
        # A client that does not read cannot be told.
        rest = pool.submit(list, stream)
        served.metric_becomes("replayssm_slots_in_use", lambda slots: slots == 2)
        assert served.stop() == 0
        *_, last, end = rest.result()
        check_unavailable(json.loads(last))
        assert end == "[DONE]"
        status, data = whole.result()
        assert status == 503
        check_unavailable(data)
        assert "Traceback" not in served.said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_wait_for_a_restart(engine: Path, signum: int) -> None:
    with serving(engine) as served:
        kill(served, SERVER)
        served.wait_for("is started again")
        family = served.family()
        assert served.stop(signum) == 0
        assert "stopped" in served.said and "ready again" not in served.said
        assert gone(family, f"trtllm_replayssm_{served.process.pid}_")
