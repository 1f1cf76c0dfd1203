"""A server as a process: why it ended, by its log, and how it is ended. Programs of a line or two stand for Triton."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.triton import serving
from trtllm_replayssm.triton.installation import Installation
from trtllm_replayssm.triton.log import ServerLog
from trtllm_replayssm.triton.server import Ports, TritonServer

PATIENCE = 30


def start(folder: Path, script: str, exit_timeout: int = 0) -> TritonServer:
    program = folder / "tritonserver"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return TritonServer(
        Installation(program), folder / "models", Ports("127.0.0.1", 1, 1, 1), exit_timeout=exit_timeout
    )


def test_reason_of_a_server_that_does_not_know_an_option(tmp_path: Path) -> None:
    """It says so first, and then all that it knows."""
    program = tmp_path / "tritonserver"
    program.write_text("""#!/bin/sh\necho "$0: unrecognized option '--nonsense'"\nseq 400\necho\nexit 1\n""")
    program.chmod(0o755)
    with TritonServer(Installation(program), tmp_path / "models", Ports("127.0.0.1", 1, 1, 1)) as server:
        with pytest.raises(EngineError, match="could not start: unrecognized option '--nonsense'"):
            server.wait_until_ready(PATIENCE)


def test_what_a_server_said_before_it_was_ready_is_no_reason_for_its_end(tmp_path: Path) -> None:
    """The model of this one has never been there."""
    program = tmp_path / "tritonserver"
    program.write_text("""#!/bin/sh\necho 'E0101 00:00:00.0 1 x.cc:1] "no GPU"'\nexec sleep 60\n""")
    program.chmod(0o755)
    with TritonServer(
        Installation(program), tmp_path / "models", Ports("127.0.0.1", 1, 1, 1), exit_timeout=0
    ) as server:
        while not server.log.lines:
            time.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "is_ready", lambda: True)
            server.wait_until_ready(PATIENCE)
        assert not server.lives()
        assert server.reason() == "the process of its model has ended"


WARNING = 'W1130 06:00:34.880896 25306 pinned_memory_manager.cc:170] "failed to allocate pinned system memory"'
ERROR = 'E1130 06:00:34.880896 25306 model.py:123] "rank 1 has ended with status 3; the model ends"'


@pytest.mark.parametrize(
    ("said", "end", "reason"),
    [
        (WARNING, "kill -9 $$", "it was ended by SIGKILL"),
        (WARNING, "exit 3", "it ended with status 3 without a word"),
        (f"{ERROR}\n{WARNING}", "exit 1", "rank 1 has ended with status 3; the model ends"),
        (f"libnone.so: cannot open\n{WARNING}\n+---+\n| I |", "exit 127", "libnone.so: cannot open"),
        ("terminate called after x\n  what():  bad news\n", "kill -6 $$", "bad news"),
    ],
)
def test_only_errors_are_reasons(tmp_path: Path, said: str, end: str, reason: str) -> None:
    (tmp_path / "said").write_text(said + "\n")
    with start(tmp_path, f"cat '{tmp_path}/said'\n{end}") as server:
        server.process.wait(PATIENCE)
        server.reader.join(PATIENCE)
        assert server.reason() == reason


def test_an_error_of_long_ago_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    log = ServerLog()
    log.add(ERROR)
    assert log.reason() == "rank 1 has ended with status 3; the model ends"
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert log.reason() is None


def test_what_follows_the_loss_of_a_model_is_no_reason():
    log = ServerLog()
    log.add('E1130 06:00:34.880896 25306 pb_stub.cc:1] "boost::interprocess::lock_exception"')
    assert log.reason() is None
    log.add('E1130 06:00:34.880896 25306 model.py:1] "rank 1 has ended with status 3; the model ends"')
    log.add('E1130 06:00:35.880896 25306 pb_stub.cc:1] "boost::interprocess::lock_exception"')
    assert log.reason() == "rank 1 has ended with status 3; the model ends"


def test_a_server_that_is_loading_is_ended_at_once(tmp_path: Path) -> None:
    """It has no requests to wait for, and does not listen to signals yet."""
    server = start(tmp_path, "trap '' TERM\nwhile :; do sleep 0.1; done", exit_timeout=10 * PATIENCE)
    begun = time.monotonic()
    server.close()
    assert server.process.returncode and time.monotonic() < begun + PATIENCE


def test_what_could_not_be_started_again_is_not_ended_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its group may be another's by then."""
    with start(tmp_path, "exec sleep 60") as server:
        (tmp_path / "tritonserver").unlink()
        with pytest.raises(UserError, match="cannot be started: No such file or directory"):
            server.restart(PATIENCE, lambda: False)
        ended: list[int] = []
        monkeypatch.setattr("trtllm_replayssm.triton.server.kill_group", ended.append)
    assert not ended


def test_a_signal_ends_a_restart(tmp_path: Path) -> None:
    """The server that is being started again never gets ready; nobody waits for it."""
    counted = tmp_path / "starts"
    server = start(tmp_path, f"echo >> '{counted}'\nexec sleep {100 * PATIENCE}")
    stop = asyncio.Event()

    async def scenario() -> None:
        watching = asyncio.create_task(serving.watch(server, stop, 100 * PATIENCE))
        deadline = time.monotonic() + PATIENCE
        while not counted.exists() or counted.read_text().count("\n") < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        stop.set()
        await asyncio.wait_for(watching, PATIENCE)

    with server:
        asyncio.run(scenario())
    assert server.process.returncode
