"""What a server must answer, by every interface at once, and how it must bear the loss of a rank."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from processes import with_command
from serving import PATIENCE, Served, Stream, ask, events, post

#: Of different lengths; more of them than the engine has slots.
PROMPTS = [
    "The sea",
    "a",
    "one two one two one two one two",
    "x" * 60,
    "12",
    "Größe, \u6c34",
    "ab" * 20,
    "Hello",
    "--- ",
    "y",
]
#: Of an engine that is served, and of a text in it that is still under way when a slow machine's client leaves it.
MAX_SEQ_LEN, LONG_OUTPUT = 2048, 2000
OUTPUT_TOKENS = 40


@dataclass(frozen=True)
class Text:
    """A prompt, and what the engine says without a server."""

    prompt: str
    token_ids: list[int]
    text: str


def check_interfaces(served: Served, model: str, expected: Sequence[Text]) -> None:
    """Token model and text model, gRPC, HTTP and OpenAI's interface, streams and single answers, all at the same time."""

    def tokens(wanted: Text) -> None:
        values = {"text_input": wanted.prompt, "request_output_len": OUTPUT_TOKENS, "streaming": True}
        # Said beforehand, some are verified several tokens at a time.
        if len(wanted.prompt) % 2:
            values |= {"draft_input_ids": wanted.token_ids}
        answer = ask(served, values)
        assert (answer.error, answer.tokens, answer.text) == ("", wanted.token_ids, wanted.text)

    def text(wanted: Text) -> None:
        body = {"text_input": wanted.prompt, "max_tokens": OUTPUT_TOKENS}
        url = f"http://{served.http}/v2/models/ensemble/generate_stream"
        streamed = [json.loads(event) for event in events(url, body | {"stream": True})]
        assert "".join(event["text_output"] for event in streamed) == wanted.text
        status, data = served.generate("ensemble", body)
        assert (status, data.get("text_output")) == (200, wanted.text), data

    def completion(wanted: Text) -> None:
        body = {"model": model, "prompt": wanted.prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        url = f"http://{served.openai}/v1/completions"
        *chunks, end = events(url, body | {"stream": True})
        assert end == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == wanted.text
        status, data = post(url, body)
        assert (status, data["choices"][0]["text"]) == (200, wanted.text)

    with ThreadPoolExecutor(3 * len(expected)) as pool:
        under_way = [pool.submit(way, wanted) for way in (tokens, text, completion) for wanted in expected]
    for one in under_way:
        one.result()


def check_lost_rank(served: Served, model: str, wanted: Text) -> None:
    """A rank is killed: clients are told, and the server starts again, with its front's connections."""
    rank = other_rank(served)
    request = {"text_input": wanted.prompt, "request_output_len": LONG_OUTPUT, "streaming": True}
    running = Stream(served, request)
    assert running.take()
    rank.kill()
    while running.take():
        pass
    assert "rank" in running.answer.error
    served.wait_for("ready again")
    assert re.search(r"has ended .* and is started again", served.said)
    check_interfaces(served, model, [wanted])


def check_lost_rank_of_a_stuck_model(served: Served, model: str, wanted: Text) -> None:
    """A rank is killed, and rank 0 cannot tell: the server starts again all the same."""
    rank, before = other_rank(served), served.said
    rank.parent().suspend()
    rank.kill()
    served.wait_for(re.escape(before) + r"(?s:.*)a rank of its model has ended(?s:.*)ready again")
    check_interfaces(served, model, [wanted])


def other_rank(served: Served) -> psutil.Process:
    """Rank 1; its parent is rank 0."""
    (rank,) = with_command(served.family(), "spawn_main")
    return rank


def check_end(served: Served) -> None:
    """Ended in the ordinary way, with every process, and nothing left in shared memory."""
    family = served.family()
    assert served.stop() == 0
    assert "Traceback" not in served.said
    assert gone(family, f"trtllm_replayssm_{served.process.pid}_")


def gone(family: list[psutil.Process], prefix: str) -> bool:
    """Whether the processes end, and nothing of them is left in shared memory."""
    _, alive = psutil.wait_procs(family, PATIENCE)
    return not alive and not list(Path("/dev/shm").glob(f"*{prefix}*"))
