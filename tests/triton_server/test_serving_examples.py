"""The examples of serving run as they are."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from serving import PATIENCE, Served, events, post

from trtllm_replayssm.cli.main import build_parser
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(*arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_triton_client(served: Served, llm: LLM, protocol: str) -> None:
    url = getattr(served, protocol)
    arguments = ["The sea", "--protocol", protocol, "--url", url, "--max_tokens", "20"]
    wanted = llm.generate("The sea", SamplingParams(max_tokens=20)).outputs[0].text  # type: ignore[union-attr]
    # Line ends and the like come through a pipe as Python reads them.
    assert run(EXAMPLES / "triton_client.py", *arguments).split() == wanted.split()


DOCUMENT = EXAMPLES.parent / "docs" / "serving.md"
#: Ports of the document, and what stands for them.
PORTS = {"8000": "http", "8002": "metrics_url", "9000": "openai"}


def curls() -> list[list[str]]:
    """Words of every curl command of the document that sends something, lines that go on joined."""
    text = DOCUMENT.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("    curl") and " -d " in line]


def test_requests_of_the_document(served: Served) -> None:
    """Each is answered with a text: in both interfaces, by tokens and by text, streaming and not."""
    asked = set()
    for words in curls():
        url = next(word for word in words if word.startswith("http"))
        body = json.loads(words[words.index("-d") + 1])
        place = url.removeprefix("http://127.0.0.1:")
        port, path = place[:4], place[4:]
        url = f"http://{getattr(served, PORTS[port])}{path}"
        if "stream" in path:
            assert "finish_reason" in list(events(url, body))[-1], words
        else:
            status, data = post(url, body)
            assert status == 200 and ("text_output" in data or data["choices"]), (words, data)
        asked.add(path)
    models = ("tensorrt_llm/generate", "tensorrt_llm/generate_stream", "ensemble/generate", "ensemble/generate_stream")
    assert asked == {"/v1/completions", *(f"/v2/models/{model}" for model in models)}


def test_stop_words_in_a_flat_list(served: Served, llm: LLM) -> None:
    """As the document says it of bodies for /generate."""
    free = llm.generate([84, 104, 101], SamplingParams(max_tokens=8)).outputs[0].token_ids  # type: ignore[union-attr]
    body = {"input_ids": [84, 104, 101], "request_output_len": 8, "stop_words_list": [258 - 1, free[3], 1, 2]}
    status, data = served.generate("tensorrt_llm", body)
    assert (status, data["finish_reason"], data["output_ids"]) == (200, "stop", free[: free.index(free[3]) + 1])


def test_openai_client(served: Served) -> None:
    said = run(EXAMPLES / "openai_client.py", "Hello", f"http://{served.openai}/v1")
    assert said.rstrip().endswith("[64 tokens]")


def test_offline_batch(engine: Path) -> None:
    said = run(EXAMPLES / "offline_batch.py", engine)
    assert said.count(" -> ") >= 16
    # 16 prompts of 8, 12, 16 and 20 tokens.
    assert "224 tokens of 16 prompts" in said


def test_replicas(server_package: None, engine: Path, tmp_path: Path) -> None:
    command = tmp_path / "trtllm-replayssm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trtllm_replayssm "$@"\n')
    command.chmod(0o755)
    port = first_of_free_ports(4)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PORT": str(port), "DEVICE": "cpu"}
    script = subprocess.Popen([EXAMPLES / "multi_gpu.sh", "replicas", engine, "1"], env=environment)
    try:
        deadline = time.monotonic() + 2 * PATIENCE
        while True:
            try:
                status, data = post(f"http://127.0.0.1:{port + 3}/v1/completions", {"model": "model", "prompt": "a"})
                break
            except OSError:
                assert script.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        assert status == 200, data
        family = psutil.Process(script.pid).children(recursive=True)
    finally:
        script.send_signal(signal.SIGTERM)
        script.wait(PATIENCE)
    assert not psutil.wait_procs(family, PATIENCE)[1]


def first_of_free_ports(count: int) -> int:
    """Of ``count`` ports that follow each other: one that is free may have neighbours that are not."""
    for _ in range(100):
        with ExitStack() as held, suppress(OSError, OverflowError):
            port = int(held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
            for other in range(port + 1, port + count):
                held.enter_context(socket.create_server(("127.0.0.1", other)))
            return port
    raise AssertionError("no free ports")


def test_load_balancer() -> None:
    """nginx.conf names the ports of two servers as multi_gpu.sh starts them."""
    conf = (EXAMPLES / "nginx.conf").read_text(encoding="utf-8")
    upstreams = dict(re.findall(r"upstream (\w+) \{(.*?)\}", conf, re.DOTALL))
    ports = {
        name: [int(port) for port in re.findall(r"server 127\.0\.0\.1:(\d+)", text)] for name, text in upstreams.items()
    }
    assert ports == {"openai": [8003, 8013], "triton_http": [8000, 8010], "triton_grpc": [8001, 8011]}
    assert set(re.findall(r"_pass \w+://(\w+);", conf)) == set(upstreams)


def test_manifest() -> None:
    """The service finds the pods and their ports, and the arguments are those of serve."""
    service, deployment = yaml.safe_load_all((EXAMPLES / "kubernetes" / "triton.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    args = build_parser().parse_args(["serve", *container["args"]])
    assert ports == {name: getattr(args, f"{name}_port") for name in ("http", "grpc", "metrics", "openai")}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    entry = (EXAMPLES / "kubernetes" / "Dockerfile").read_text(encoding="utf-8").split("ENTRYPOINT ")[1]
    assert json.loads(entry)[:2] == ["trtllm-replayssm", "serve"]
