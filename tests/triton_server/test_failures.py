"""Errors that nobody has thought of, in OpenAI's interface: its clients get the form that they know."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.triton.openai.app import Front
from trtllm_replayssm.triton.openai.backend import Piece


class Faulty:
    """A backend with a fault behind its first pieces."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    async def stream(self, token_ids: list[int], params: SamplingParams) -> AsyncIterator[Piece]:
        for _ in range(self.pieces):
            yield Piece("a", [65])
        raise ZeroDivisionError("division by zero")


def ask(engine: Path, pieces: int, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the answer."""

    async def scenario() -> tuple[int, str]:
        front = Front(engine, "tiny", Faulty(pieces))  # type: ignore[arg-type]
        async with TestClient(TestServer(front.app())) as client:
            answer = await client.post("/v1/completions", json={"prompt": "a"} | body)
            return answer.status, await answer.text()

    return asyncio.run(scenario())


def check(error: dict[str, Any]) -> None:
    message = "unexpected ZeroDivisionError: division by zero"
    assert error == {"error": {"message": message, "type": "server_error", "param": None, "code": 500}}


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_a_fault_before_the_first_piece_is_the_answer(engine: Path, body: dict[str, Any]) -> None:
    status, text = ask(engine, 0, body)
    assert status == 500
    check(json.loads(text))


def test_a_fault_behind_the_first_piece_is_an_event(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    status, text = ask(engine, 2, {"stream": True})
    first, second, error, end = (line.removeprefix("data: ") for line in text.split("\n\n")[:-1])
    assert status == 200 and end == "[DONE]"
    assert [json.loads(piece)["choices"][0]["text"] for piece in (first, second)] == ["a", "a"]
    check(json.loads(error))
    assert "a request failed: unexpected ZeroDivisionError" in caplog.text
