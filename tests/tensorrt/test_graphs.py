"""When an execution is enqueued, captured and replayed; the CUDA of torch is a record of calls."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.runtime.tensorrt.plan import Execution


class Calls(list[str]):
    """A plan on a GPU that only says what is asked of it, and torch's graphs likewise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accepted: bool = True) -> None:
        self.accepted = accepted
        self.current = SimpleNamespace(wait_stream=lambda other: self.append("caller waits"))
        self.stream = SimpleNamespace(wait_stream=lambda other: self.append("plan waits"), cuda_stream=9)
        graph = SimpleNamespace(replay=lambda: self.append("replay"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capturing)

    @contextmanager
    def capturing(self, graph: Any, stream: Any, capture_error_mode: str) -> Any:
        assert stream is self.stream
        self.append("capture")
        yield
        self.append("captured")

    def execute_async_v3(self, stream_handle: int) -> bool:
        self.append(f"enqueue on {stream_handle}")
        return self.accepted

    def plan(self) -> Any:
        def refuse(what: str) -> None:
            raise EngineError(what)

        context = SimpleNamespace(execute_async_v3=self.execute_async_v3)
        return SimpleNamespace(
            stream=self.stream, stream_handle=9, device="cuda", context=lambda profile: context, refuse=refuse
        )


def test_the_second_run_is_captured_and_all_later_ones_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    execution = Execution(calls.plan(), 1, graph=True)
    runs = []
    for _ in range(4):
        calls.clear()
        execution.run()
        assert (calls[0], calls[-1]) == ("plan waits", "caller waits")
        runs.append(calls[1:-1])
    assert runs == [["enqueue on 9"], ["capture", "enqueue on 9", "captured", "replay"], ["replay"], ["replay"]]


def test_prefills_are_enqueued_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    execution = Execution(calls.plan(), 0, graph=False)
    for _ in range(3):
        execution.run()
    assert [call for call in calls if "wait" not in call] == ["enqueue on 9"] * 3


def test_a_step_that_tensorrt_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="TensorRT could not run the step"):
        Execution(Calls(monkeypatch, accepted=False).plan(), 0, graph=False).run()
