"""A served engine, and clients of it, for tests."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpc

#: Longest wait for anything, in seconds.
PATIENCE = 120


class Served:
    """``trtllm-replayssm serve`` in a process of its own, ready."""

    def __init__(self, engine: Path, *options: str, ports: Sequence[int] = (0, 0, 0, 0)) -> None:
        command = [
            sys.executable,
            "-m",
            "trtllm_replayssm",
            "serve",
            "--engine_dir",
            str(engine),
            "--exit_timeout",
            "2",
        ]
        command += options
        for name, port in zip(("http", "grpc", "metrics", "openai"), ports):
            command += [f"--{name}_port", str(port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.said = ""
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.wait_for(r"OpenAI")
        self.ports = [int(re.search(rf"{name}\D+127\.0\.0\.1:(\d+)", self.said)[1]) for name in NAMES]  # type: ignore[index]
        self.http, self.grpc, self.metrics_url, self.openai = (f"127.0.0.1:{port}" for port in self.ports)

    def read(self) -> None:
        for line in self.process.stderr or ():
            with self.changed:
                self.said += line
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 2 * PATIENCE
        with self.changed:
            while not re.search(pattern, self.said):
                left = deadline - time.monotonic()
                assert self.reader.is_alive() and left > 0, self.said
                self.changed.wait(left)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(PATIENCE)

    def metrics(self) -> dict[str, float]:
        """Values of our families, by name and ``{status}`` where there is one."""
        with urllib.request.urlopen(f"http://{self.metrics_url}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        found = {}
        for name, labels, value in re.findall(r"^(replayssm_\w+)\{(.*?)\} (\S+)$", text, re.MULTILINE):
            status = re.search(r'status="(\w+)"', labels)
            if 'le="' not in labels:
                found[name + (f"{{{status[1]}}}" if status else "")] = float(value)
        return found

    def metric_becomes(self, name: str, wanted: Callable[[float], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not wanted(self.metrics()[name]):
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.05)

    def settled(self) -> dict[str, float]:
        """Values when all requests have ended and everything is told."""
        deadline = time.monotonic() + PATIENCE
        while True:
            before = self.metrics()
            time.sleep(0.3)
            after = self.metrics()
            if before == after and after["replayssm_slots_in_use"] == 0:
                return after
            assert time.monotonic() < deadline, after

    def generate(self, model: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return post(f"http://{self.http}/v2/models/{model}/generate", body)


NAMES = ("HTTP", "gRPC", "metrics", "OpenAI")


@contextmanager
def serving(engine: Path, *options: str, **more: Any) -> Iterator[Served]:
    served = Served(engine, *options, **more)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def events(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Data of server-sent events."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line.decode()[len("data: ") :].strip()


TYPES = {"f": np.float32, "i": np.int32, "u": np.uint64, "b": np.bool_}
UNSIGNED = ("seed",)


def tensors(values: dict[str, Any]) -> list[grpc.InferInput]:
    """Inputs of a gRPC request; arrays as they are, scalars and lists as the model's types, with the batch dimension."""
    made = []
    for name, value in values.items():
        array = value if isinstance(value, np.ndarray) else as_array(name, value)
        kind = "BYTES" if array.dtype == np.object_ else str(grpc.np_to_triton_dtype(array.dtype))
        tensor = grpc.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def as_array(name: str, value: Any) -> np.ndarray:
    many = value if isinstance(value, list) else [value]
    if isinstance(many[0], str):
        return np.asarray([[text.encode() for text in many]], np.object_)
    array = np.asarray([many])
    return array.astype(np.uint64 if name in UNSIGNED else TYPES[array.dtype.kind])


@dataclass
class Answer:
    """What came back on a stream. responses: tokens of each response, in order. last: all tensors of the last one."""

    responses: list[list[int]] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    last: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""

    @property
    def tokens(self) -> list[int]:
        return [token for tokens in self.responses for token in tokens]


class Stream:
    """One request on a gRPC stream of its own."""

    def __init__(
        self, served: Served, values: dict[str, Any], model: str = "tensorrt_llm", request_id: str = ""
    ) -> None:
        self.served, self.client = served, grpc.InferenceServerClient(served.grpc)
        self.results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.results.put((result, error)))
        self.client.async_stream_infer(model, tensors(values), request_id=request_id, enable_empty_final_response=True)
        self.answer = Answer()

    def take(self) -> bool:
        """Wait for one response; whether more follow."""
        try:
            result, error = self.results.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"no response in {PATIENCE} s; the server said:\n{self.served.said}") from None
        answer = self.answer
        if error is not None:
            answer.error = str(error)
            return False
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        if outputs:
            answer.last = outputs
            answer.responses.append(outputs["output_ids"].reshape(-1).tolist())
            answer.text += outputs["text_output"].reshape(-1)[0].decode()
            answer.finish_reason = outputs["finish_reason"].reshape(-1)[0].decode()
        return not response.parameters["triton_final_response"].bool_param

    def finish(self) -> Answer:
        """Take everything, and close the stream."""
        while self.take():
            pass
        self.client.stop_stream()
        return self.answer

    def leave(self) -> None:
        self.client.stop_stream(cancel_requests=True)


def ask(served: Served, values: dict[str, Any], **more: Any) -> Answer:
    return Stream(served, values, **more).finish()
