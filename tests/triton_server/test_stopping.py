"""How ``serve`` ends when a client, or whoever sends signals, does not help. A small program stands for Triton."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trtllm_replayssm.triton import MODEL_FILE_VARIABLE

PATIENCE = 60
#: Always ready, and its own model. Told to stop, it says so in a file, and ends when there is the file that allows it.
SERVER = f"""#!{sys.executable}
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def stop(*_):
    Path(__file__).with_name("stopping").touch()
    while not Path(__file__).with_name("may_end").exists():
        time.sleep(0.01)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
(port,) = [int(word.split("=")[1]) for word in sys.argv if word.startswith("--http-port=")]
with HTTPServer(("127.0.0.1", port), Ready) as server:
    Path(os.environ["{MODEL_FILE_VARIABLE}"]).write_text(str(os.getpid()))
    server.serve_forever()
"""


@contextmanager
def serving(engine: Path, folder: Path, exit_timeout: int) -> Iterator[subprocess.Popen[str]]:
    """``serve`` in a process of its own, before the program above in ``folder``, where its work folder lies, too."""
    program = folder / "tritonserver"
    program.write_text(SERVER)
    program.chmod(0o755)
    words = [sys.executable, "-m", "trtllm_replayssm", "serve", "--engine_dir", engine, "--tritonserver", program]
    words += ["--exit_timeout", str(exit_timeout)]
    words += [word for name in ("http", "grpc", "metrics", "openai") for word in (f"--{name}_port", "0")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        (folder / "may_end").touch()
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    """The first group of what is said sooner or later."""
    said = ""
    for line in process.stderr or ():
        said += line
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(said)


def check_end(process: subprocess.Popen[str], folder: Path) -> None:
    _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said.splitlines()[-1], "Traceback" in said) == (0, "stopped", False)
    assert not list(folder.glob("trtllm-replayssm-*"))


@pytest.mark.parametrize("exit_timeout", [0, 10 * PATIENCE])
def test_half_a_request_is_not_waited_for(engine: Path, tmp_path: Path, exit_timeout: int) -> None:
    """There is no limit that would count for aiohttp: 0 is none, and any other is waited out twice."""
    (tmp_path / "may_end").touch()
    with serving(engine, tmp_path, exit_timeout) as process:
        port = int(wait_for(process, r"OpenAI +http://127\.0\.0\.1:(\d+)"))
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
            )
            # It is being handled when that comes.
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            client.sendall(b'{"model": ')
            process.send_signal(signal.SIGTERM)
            check_end(process, tmp_path)


@pytest.mark.parametrize("with_text", [True, False])
def test_a_second_signal_changes_nothing(engine: Path, tmp_path: Path, with_text: bool) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "copy"))
    if not with_text:
        (copy / "tokenizer.json").unlink()
    with serving(copy, tmp_path, 10 * PATIENCE) as process:
        wait_for(process, r"OpenAI(.*)")
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "stopping").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        (tmp_path / "may_end").touch()
        check_end(process, tmp_path)
