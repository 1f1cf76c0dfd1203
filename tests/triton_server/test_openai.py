"""OpenAI's interface before the Triton server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served_ranks import LONG_OUTPUT, MAX_SEQ_LEN
from serving import PATIENCE, Served, events, post

from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.outputs import CompletionOutput
from trtllm_replayssm.runtime.sampling import SamplingParams

GREEDY = {"model": "tiny", "temperature": 0}


def complete(served: Served, body: dict[str, Any], chat: bool = False) -> tuple[int, dict[str, Any]]:
    return post(f"http://{served.openai}/v1/{'chat/' if chat else ''}completions", GREEDY | body)


def chunks(served: Served, body: dict[str, Any], chat: bool = False) -> list[dict[str, Any]]:
    """A stream's chunks; it must end as OpenAI's do."""
    url = f"http://{served.openai}/v1/{'chat/' if chat else ''}completions"
    *data, last = events(url, GREEDY | {"stream": True} | body)
    assert last == "[DONE]"
    return [json.loads(item) for item in data]


def alone(llm: LLM, prompt: str | list[int], **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**params)).outputs[0]  # type: ignore[union-attr]


def test_models(served: Served) -> None:
    with urllib.request.urlopen(f"http://{served.openai}/v1/models", timeout=PATIENCE) as answer:
        (model,) = json.loads(answer.read())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", MAX_SEQ_LEN)
    with urllib.request.urlopen(f"http://{served.openai}/v1/models/tiny", timeout=PATIENCE) as answer:
        assert json.loads(answer.read())["id"] == "tiny"
    with urllib.request.urlopen(f"http://{served.openai}/health", timeout=PATIENCE) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("prompt", ["The sea, \u6c34", [65, 66, 67]])
def test_completion(served: Served, llm: LLM, prompt: str | list[int]) -> None:
    wanted = alone(llm, prompt, max_tokens=16)
    status, data = complete(served, {"prompt": prompt})
    assert status == 200, data
    assert data["object"] == "text_completion"
    assert data["choices"] == [{"index": 0, "text": wanted.text, "logprobs": None, "finish_reason": "length"}]
    read = len(prompt.encode()) if isinstance(prompt, str) else len(prompt)
    assert data["usage"] == {"prompt_tokens": read, "completion_tokens": 16, "total_tokens": read + 16}
    streamed = chunks(served, {"prompt": prompt, "stream_options": {"include_usage": True}})
    assert streamed[-1]["usage"] == data["usage"] and streamed[-1]["choices"] == []
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == wanted.text
    assert [
        chunk["choices"][0]["finish_reason"] for chunk in streamed[:-1] if chunk["choices"][0]["finish_reason"]
    ] == ["length"]
    assert len({chunk["id"] for chunk in streamed}) == 1


def test_several_prompts_and_choices(served: Served, llm: LLM) -> None:
    body = {"prompt": ["a", "bc"], "n": 2, "temperature": 0.75, "top_p": 0.5, "seed": 5, "max_tokens": 12}
    status, data = complete(served, body)
    assert status == 200, data
    params = {"max_tokens": 12, "temperature": 0.75, "top_p": 0.5}
    wanted = [alone(llm, prompt, seed=seed, **params).text for prompt in ("a", "bc") for seed in (5, 6)]
    assert [choice["text"] for choice in data["choices"]] == wanted
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks(served, body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == wanted


def test_chat(served: Served, llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "no."}]},
    ]
    prompt = "system: Be brief.\nuser: Say no.\nassistant:"
    wanted = alone(llm, prompt, max_tokens=10)
    status, data = complete(served, {"messages": messages, "max_completion_tokens": 10}, chat=True)
    assert status == 200, data
    (choice,) = data["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == wanted.text
    assert data["usage"]["prompt_tokens"] == len(prompt)
    streamed = chunks(served, {"messages": messages, "max_tokens": 10}, chat=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == wanted.text
    # Without a limit, a chat goes on for as long as there is room.
    status, data = complete(served, {"messages": messages}, chat=True)
    assert data["usage"]["total_tokens"] == MAX_SEQ_LEN


def test_stop_and_logprobs(served: Served, llm: LLM) -> None:
    free = alone(llm, "stop", max_tokens=30)
    stop = free.text[8:10]
    wanted = alone(llm, "stop", max_tokens=30, stop=stop, logprobs=2)
    body = {"prompt": "stop", "max_tokens": 30, "stop": [stop], "logprobs": 2}
    _, data = complete(served, body)
    (choice,) = data["choices"]
    assert (choice["text"], choice["finish_reason"]) == (wanted.text, "stop")
    own = [places[token].logprob for token, places in zip(wanted.token_ids, wanted.logprobs or [])]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-5)
    assert all(1 <= len(place) <= 3 for place in choice["logprobs"]["top_logprobs"])
    values = [value for chunk in chunks(served, body) for value in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    assert values == choice["logprobs"]["token_logprobs"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 4}
    _, data = complete(served, chat, chat=True)
    places = data["choices"][0]["logprobs"]["content"]
    assert [len(place["top_logprobs"]) for place in places] == [4, 4, 4]
    assert all(place["logprob"] == place["top_logprobs"][0]["logprob"] for place in places)


def test_penalties_and_least_lengths(served: Served, llm: LLM) -> None:
    penalties = {"repetition_penalty": 0.5, "presence_penalty": -1.5, "frequency_penalty": 0.75}
    free, wanted = alone(llm, "FGFG", max_tokens=20), alone(llm, "FGFG", max_tokens=20, **penalties)
    assert wanted.token_ids != free.token_ids
    assert complete(served, {"prompt": "FGFG", "max_tokens": 20, **penalties})[1]["choices"][0]["text"] == wanted.text
    ending = {"stop_token_ids": [wanted.token_ids[3]], "min_tokens": 12}
    ended = alone(llm, "FGFG", max_tokens=20, **ending, **penalties)
    assert len(ended.token_ids) >= 12
    _, data = complete(served, {"prompt": "FGFG", "max_tokens": 20, **ending, **penalties})
    assert data["choices"][0]["text"] == ended.text
    # A chat's limit is known with its prompt, and may be above the least.
    chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 20, "stop_token_ids": [200]}
    status, data = complete(served, chat, chat=True)
    assert status == 200 and data["usage"]["completion_tokens"] >= 20


def test_many_clients_at_once(served: Served, llm: LLM) -> None:
    def one(i: int) -> str:
        body = {"prompt": "x" * (1 + i % 7), "max_tokens": 5 + i}
        if i % 2:
            return "".join(chunk["choices"][0]["text"] for chunk in chunks(served, body))
        return complete(served, body)[1]["choices"][0]["text"]

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(one, range(32)))
    assert texts == [alone(llm, "x" * (1 + i % 7), max_tokens=5 + i).text for i in range(32)]


BAD = {
    "no prompt": ({}, "prompt is missing"),
    "unknown key": ({"prompt": "a", "guided_regex": "x"}, "guided_regex is not supported"),
    "type": ({"prompt": 5}, "prompt must be"),
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature must be"),
    "top_p": ({"prompt": "a", "top_p": 2}, "top_p is 2"),
    "tokens": ({"prompt": "a", "max_tokens": 0}, "max_tokens must be"),
    "too many tokens": ({"prompt": "a", "max_tokens": MAX_SEQ_LEN}, f"more than the model's {MAX_SEQ_LEN}"),
    "too long a prompt": ({"prompt": "a" * (MAX_SEQ_LEN + 1)}, f"more than the model's {MAX_SEQ_LEN}"),
    "unknown id": ({"prompt": [65, 300]}, "token id 300"),
    "empty": ({"prompt": ""}, "a prompt is empty"),
    "penalty": ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty must be a number, -2 to 2"),
    "penalty without meaning": ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty is 0"),
    "more tokens than at most": ({"prompt": "a", "max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, more than"),
    "more tokens than there is room for": ({"prompt": "a", "min_tokens": 999, "max_tokens": None}, "min_tokens is 999"),
    "echo": ({"prompt": "a", "echo": True}, "echo must be false"),
    "too many choices": ({"prompt": "a", "n": 100}, "n must be"),
    "stream options": ({"prompt": "a", "stream_options": {"include_usage": True}}, "only for streams"),
    "half a character": ({"prompt": "\ud800"}, "not Unicode"),
    "half a character to stop at": ({"prompt": "a", "stop": ["b", "\ud800"]}, "not Unicode"),
    "half a character in a chat": ({"messages": [{"role": "user", "content": "\ud800"}]}, "not Unicode"),
    "seed beyond 64 bits": ({"prompt": "a", "seed": 1 << 64}, "seed must be"),
    "top_k beyond 32 bits": ({"prompt": "a", "top_k": 1 << 40}, "top_k must be"),
    "temperature beyond float32": ({"prompt": "a", "temperature": 1e39}, "temperature must be"),
    "temperature beyond float64": ({"prompt": "a", "temperature": 10**400}, "temperature must be"),
    "unknown end": ({"prompt": "a", "stop_token_ids": [65, 300]}, "end token 300"),
    "end beyond 32 bits": ({"prompt": "a", "stop_token_ids": [1 << 32]}, "end token 4294967296"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(served: Served, name: str, stream: bool) -> None:
    body, reason = BAD[name]
    more = {"stream": True} if stream and name != "stream options" else {}
    status, data = complete(served, body | more, chat="messages" in body)
    assert (status, data["error"]["type"]) == (400, "invalid_request_error")
    assert reason in data["error"]["message"]


def test_other_refusals(served: Served) -> None:
    url = f"http://{served.openai}/v1/completions"
    assert post(url, b"{")[0] == 400
    assert post(url, b"[" * 100_000)[0] == 400
    assert post(url, b'{"prompt": "a", "temperature": NaN}')[0] == 400
    status, data = complete(served, {"model": "other", "prompt": "a"})
    assert (status, "tiny" in data["error"]["message"]) == (404, True)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    for messages in ([], ["text"], [{"content": "no role"}], [image]):
        assert complete(served, {"messages": messages}, chat=True)[0] == 400
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{served.openai}/v1/nothing", timeout=PATIENCE)
    assert caught.value.code == 404


def test_leaving_ends_the_request(served: Served) -> None:
    before = served.settled()["replayssm_requests_total{cancelled}"]
    url, body = f"http://{served.openai}/v1/completions", GREEDY | {"prompt": "long", "max_tokens": LONG_OUTPUT, "n": 3}
    stream = events(url, body | {"stream": True})
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    served.metric_becomes("replayssm_requests_total{cancelled}", lambda count: count == before + 3)
    assert served.settled()["replayssm_slots_in_use"] == 0
