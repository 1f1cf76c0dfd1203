"""A real Triton server: what its clients get is what the engine gives without one, whatever others do."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from processes import with_command
from served_ranks import LONG_OUTPUT, MAX_SEQ_LEN
from serving import PATIENCE, Served, Stream, ask, events, post

from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling import SamplingParams

LONG = {"input_ids": [65, 66, 67], "request_output_len": LONG_OUTPUT, "streaming": True}
SHORTER = 250


def workload(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and outputs of different lengths, half of them sampled."""
    numbers = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [numbers.randrange(2, 258) for _ in range(numbers.choice((1, 3, 17, 40, 90)))]
        sampling: dict[str, Any] = {"temperature": 0.75, "top_p": 0.875, "top_k": 40, "seed": i} if i % 2 else {}
        made.append((prompt, SamplingParams(max_tokens=numbers.choice((1, 5, 20, 60)), **sampling)))
    return made


def request(prompt: list[int], params: SamplingParams, streaming: bool) -> dict[str, Any]:
    values = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": params.max_tokens}
    if not params.greedy:
        values |= {"temperature": params.temperature, "runtime_top_p": params.top_p, "runtime_top_k": params.top_k}
        values |= {"seed": params.seed}
    return values | {"streaming": streaming}


def test_32_streams_at_once_equal_generate(served: Served, llm: LLM) -> None:
    work = workload(32, seed=1)
    before = served.settled()
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda one: ask(served, request(*one, streaming=True)), work))
    expected = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    for answer, wanted in zip(answers, expected):
        completion = wanted.outputs[0]
        assert (answer.tokens, answer.text) == (completion.token_ids, completion.text)
        assert (answer.finish_reason, answer.error) == (completion.finish_reason, "")
        # As they are made, not everything at the end.
        assert len(answer.responses) > 1 or len(answer.tokens) < 20
    generated = sum(len(answer.tokens) for answer in answers)
    served.metric_becomes("replayssm_requests_total{length}", lambda ended: ended - before[ENDED] == 32)
    after = served.metrics()
    assert after["replayssm_generated_tokens_total"] - before["replayssm_generated_tokens_total"] == generated
    # Together in the slots: one by one would take a step for each token.
    assert after["replayssm_steps_total"] - before["replayssm_steps_total"] < generated / 3


ENDED = "replayssm_requests_total{length}"


def test_http_streams_and_single_answers(served: Served, llm: LLM) -> None:
    """Server-sent events and one answer by HTTP; one response by gRPC; at the same time."""
    work = workload(12, seed=2)
    url = f"http://{served.http}/v2/models/tensorrt_llm/generate"

    def stream(one: tuple[list[int], SamplingParams]) -> tuple[list[int], str]:
        data = [json.loads(event) for event in events(url + "_stream", request(*one, streaming=True))]
        # Triton writes a list of one as a number.
        ids = [d["output_ids"] if isinstance(d["output_ids"], list) else [d["output_ids"]] for d in data]
        return [token for tokens in ids for token in tokens], "".join(d["text_output"] for d in data)

    def single(one: tuple[list[int], SamplingParams]) -> tuple[list[int], str]:
        status, data = served.generate("tensorrt_llm", request(*one, streaming=False))
        assert status == 200, data
        ids = data["output_ids"]
        return ids if isinstance(ids, list) else [ids], data["text_output"]

    def by_grpc(one: tuple[list[int], SamplingParams]) -> tuple[list[int], str]:
        answer = ask(served, request(*one, streaming=False))
        assert len(answer.responses) == 1
        return answer.tokens, answer.text

    ways = (stream, single, by_grpc)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda item: ways[item[0] % 3](item[1]), enumerate(work)))
    expected = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    assert answers == [(wanted.outputs[0].token_ids, wanted.outputs[0].text) for wanted in expected]


def test_text_model(served: Served, llm: LLM) -> None:
    """Text in, text out, with the names of TensorRT-LLM's text models; a text of several bytes a character keeps them."""
    prompt = "Größe, \u6c34, \U0001f30a"
    wanted = llm.generate(prompt, SamplingParams(max_tokens=40)).outputs[0]  # type: ignore[union-attr]
    answer = ask(served, {"text_input": prompt, "max_tokens": 40, "stream": True}, model="ensemble")
    assert (answer.text, answer.tokens) == (wanted.text, wanted.token_ids)
    stop = wanted.text[10:12]
    cut = llm.generate(prompt, SamplingParams(max_tokens=40, stop=stop)).outputs[0]  # type: ignore[union-attr]
    values = {"text_input": prompt, "max_tokens": 40, "stream": True, "stop_words": [stop, "never said"]}
    answer = ask(served, values, model="ensemble")
    assert (answer.text, answer.finish_reason) == (cut.text, "stop")
    assert stop not in answer.text


def test_extras_of_a_request(served: Served, llm: LLM) -> None:
    prompt, params = [70, 71, 72], SamplingParams(max_tokens=9, logprobs=3, return_generation_logits=True)
    wanted = llm.generate(prompt, params).outputs[0]  # type: ignore[union-attr]
    values = {"input_ids": prompt, "request_output_len": 9, "exclude_input_in_output": False}
    values |= {"num_log_probs": 3, "return_generation_logits": True, "return_perf_metrics": True}
    answer = ask(served, values)
    last = answer.last
    assert answer.tokens == [*prompt, *wanted.token_ids]
    assert last["sequence_length"].tolist() == [[12]]
    own = [places[token].logprob for token, places in zip(wanted.token_ids, wanted.logprobs or [])]
    np.testing.assert_allclose(last["output_log_probs"][0, 0], own, atol=1e-5)
    np.testing.assert_allclose(last["cum_log_probs"][0, 0], wanted.cumulative_logprob, atol=1e-4)
    assert last["top_token_ids"].shape == (1, 1, 9, 3)
    assert (last["top_token_ids"][0, 0, :, 0] == wanted.token_ids).all()
    np.testing.assert_allclose(last["generation_logits"][0, 0], wanted.generation_logits, atol=1e-5)
    times = [last[f"{name}_time_ns"].item() for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times) and abs(times[0] - time.time_ns()) < PATIENCE * 1e9


def test_penalties_and_least_lengths(served: Served, llm: LLM) -> None:
    """By both models; the values are numbers that float32 has."""
    penalties = {"repetition_penalty": 0.5, "presence_penalty": -1.5, "frequency_penalty": 0.75}
    prompt = [70, 71, 70, 71]
    free = llm.generate(prompt, SamplingParams(max_tokens=20)).outputs[0].token_ids  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=20, **penalties)
    wanted = llm.generate(prompt, params).outputs[0].token_ids  # type: ignore[union-attr]
    assert wanted != free
    values = {"input_ids": prompt, "request_output_len": 20, **penalties}
    assert ask(served, values).tokens == wanted
    ending = {"end_id": wanted[3], "min_tokens": 12}
    ended = llm.generate(prompt, SamplingParams(max_tokens=20, **ending, **penalties)).outputs[0]  # type: ignore
    assert len(ended.token_ids) >= 12
    assert ask(served, values | ending).tokens == ended.token_ids
    said = llm.generate("FGFG", params).outputs[0]  # type: ignore[union-attr]
    assert ask(served, {"text_input": "FGFG", "max_tokens": 20, **penalties}, model="ensemble").text == said.text


# ---- clients that leave ----------------------------------------------------------------------------------------------


def test_drafts_of_a_client_save_steps(served: Served, llm: LLM) -> None:
    prompt = [70, 71, 72]
    wanted = llm.generate(prompt, SamplingParams(max_tokens=21)).outputs[0].token_ids  # type: ignore[union-attr]
    values = {"input_ids": prompt, "request_output_len": 21, "return_perf_metrics": True}
    for drafts, accepted in ((wanted, 15), ([0, -1, 0], 0), ([(wanted[0] + 1) % 250], 0)):
        answer = ask(served, values | {"draft_input_ids": drafts})
        assert answer.tokens == wanted
        assert answer.last["total_accepted_draft_tokens"].item() == accepted
    guess = {"prompt_token_ids": prompt, "draft_token_ids": wanted}
    assert llm.generate(guess, SamplingParams(max_tokens=21)).outputs[0].token_ids == wanted  # type: ignore[union-attr]


def test_leaving_frees_the_slot(served: Served, llm: LLM) -> None:
    """A gRPC stream that is cancelled, an HTTP stream that is dropped, and a stop request; the others go on."""
    cancelled = served.settled()["replayssm_requests_total{cancelled}"]
    stays = Stream(served, LONG | {"request_output_len": SHORTER})
    left, stopped = Stream(served, LONG | {"seed": 1}), Stream(served, LONG | {"seed": 2}, request_id="mine")
    assert left.take() and stopped.take()
    left.leave()
    dropped = events(f"http://{served.http}/v2/models/ensemble/generate_stream", TEXT_LONG)
    next(dropped)
    dropped.close()  # type: ignore[attr-defined]
    assert ask(served, {"stop": True}, request_id="mine").error == ""
    ended = stopped.finish()
    assert (ended.finish_reason, ended.error) == ("cancelled", "")
    assert 0 < len(ended.tokens) < LONG_OUTPUT
    wanted = llm.generate(LONG["input_ids"], SamplingParams(max_tokens=SHORTER)).outputs[0]  # type: ignore
    assert stays.finish().tokens == wanted.token_ids
    served.metric_becomes("replayssm_slots_in_use", lambda slots: slots == 0)
    assert served.metrics()["replayssm_requests_total{cancelled}"] - cancelled >= 2


TEXT_LONG = {"text_input": "a", "max_tokens": LONG_OUTPUT, "stream": True}


def test_many_clients_leave_at_once(served: Served, llm: LLM) -> None:
    """Time and again, while others come; nothing is lost and nothing hangs."""
    numbers = random.Random(3)
    work = workload(24, seed=4)

    def one(item: tuple[int, tuple[list[int], SamplingParams]]) -> list[int] | None:
        index, (prompt, params) = item
        stream = Stream(served, request(prompt, params, streaming=True))
        if index % 2 == 0:
            return stream.finish().tokens
        time.sleep(numbers.random() / 10)
        stream.leave()
        return None

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, enumerate(work)))
    expected = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    for answer, wanted in zip(answers, expected):
        assert answer is None or answer == wanted.outputs[0].token_ids
    served.metric_becomes("replayssm_slots_in_use", lambda slots: slots == 0)


# ---- requests that cannot be -----------------------------------------------------------------------------------------

GOOD = {"input_ids": [65, 66, 67], "request_output_len": 4}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"input_ids": np.asarray([[65, 66]], np.int64)}, "data-type"),
    "shape": ({"input_ids": np.asarray([65, 66], np.int32)}, "batch size"),
    "batch": ({"input_ids": np.asarray([[65], [66]], np.int32)}, "batch size"),
    "unknown tensor": ({"no_such_input": 1}, "no_such_input"),
    "negative length": ({"input_lengths": -1}, "input_lengths is -1"),
    "length beyond the ids": ({"input_lengths": 4}, "input_lengths is 4, but input_ids holds 3"),
    "no tokens": ({"input_ids": np.zeros((1, 0), np.int32)}, "is empty"),
    "negative output": ({"request_output_len": -5}, "request_output_len is -5"),
    "no output": ({"request_output_len": 0}, "request_output_len is 0"),
    "too long output": ({"request_output_len": MAX_SEQ_LEN - 2}, f"more than max_seq_len {MAX_SEQ_LEN}"),
    "longest integer": ({"request_output_len": 2**31 - 1}, f"more than max_seq_len {MAX_SEQ_LEN}"),
    "too long prompt": ({"input_ids": [65] * MAX_SEQ_LEN}, f"max_seq_len {MAX_SEQ_LEN}"),
    "unknown id": ({"input_ids": [65, 258]}, "token id 258"),
    "negative id": ({"input_ids": [-1]}, "token id -1"),
    "NaN temperature": ({"temperature": math.nan}, "temperature is nan"),
    "infinite temperature": ({"temperature": math.inf}, "temperature is inf"),
    "negative temperature": ({"temperature": -1.0}, "temperature is -1"),
    "NaN top_p": ({"runtime_top_p": math.nan}, "top_p is nan"),
    "top_p beyond 1": ({"runtime_top_p": 1.5}, "top_p is 1.5"),
    "negative top_k": ({"runtime_top_k": -2}, "top_k is -2"),
    "unknown draft": ({"draft_input_ids": [65, 258]}, "the draft of the prompt .* token id 258"),
    "unknown end": ({"end_id": 9999}, "end token 9999"),
    "beams": ({"beam_width": 4}, "beam_width is 4"),
    "penalty": ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    "NaN penalty": ({"presence_penalty": math.nan}, "presence_penalty is nan"),
    "negative least": ({"min_tokens": -1}, "min_tokens is -1"),
    "more tokens than at most": ({"min_tokens": 300}, "min_tokens is 300, more than max_tokens"),
    "bad words": ({"bad_words": ["no"]}, "bad_words"),
    "stop words of no length": ({"stop_words_list": np.asarray([[[65], [7]]], np.int32)}, "word ends at 7"),
    "stop words of negative ids": ({"stop_words_list": np.asarray([[[65, -6], [2, -1]]], np.int32)}, "id -6"),
    "two prompts": ({"text_input": "a"}, "not both"),
    "not UTF-8": ({"input_ids": None, "text_input": np.asarray([[b"\xff"]], np.object_)}, "not UTF-8"),
    "nothing to read": ({"input_ids": None}, "either input_ids or text_input"),
}


def test_malformed_requests_have_an_error_and_no_effect(served: Served, llm: LLM) -> None:
    """Each is answered by its own sentence, while another request runs."""
    rejected = served.settled()["replayssm_requests_total{rejected}"]
    wanted = llm.generate(LONG["input_ids"], SamplingParams(max_tokens=SHORTER)).outputs[0]  # type: ignore
    stays = Stream(served, LONG | {"request_output_len": SHORTER})
    assert stays.take()
    for name, (change, reason) in BAD.items():
        values = {key: value for key, value in (GOOD | change).items() if value is not None}
        answer = ask(served, values)
        assert not answer.tokens and re.search(reason, answer.error), (name, answer.error)
    assert stays.finish().tokens == wanted.token_ids
    served.metric_becomes("replayssm_requests_total{rejected}", lambda count: count - rejected >= len(BAD) - 4)


def test_malformed_http(served: Served) -> None:
    for body in (b"{", b"[1]", b"\xff\xfe", json.dumps({"input_ids": "x", "request_output_len": 4}).encode()):
        status, data = post(f"http://{served.http}/v2/models/tensorrt_llm/generate", body)
        assert status >= 400 and data["error"]
    status, data = served.generate("tensorrt_llm", GOOD | {"temperature": -3})
    assert status == 400 and "temperature is -3" in data["error"]
    assert served.generate("tensorrt_llm", GOOD)[0] == 200


def test_plain_infer_is_refused_by_triton(served: Served) -> None:
    """A decoupled model has no single answer for it; the generate endpoints have."""
    values = {"name": "input_ids", "shape": [1, 1], "datatype": "INT32", "data": [65]}
    status, data = post(f"http://{served.http}/v2/models/tensorrt_llm/infer", {"inputs": [values]})
    assert status >= 400 and "decoupled" in data["error"]


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_configuration_is_what_clients_expect(served: Served) -> None:
    client = grpc.InferenceServerClient(served.grpc)
    for model, needed in (
        ("tensorrt_llm", {"input_ids", "input_lengths", "request_output_len", "streaming", "end_id", "runtime_top_k"}),
        ("ensemble", {"text_input", "max_tokens", "stop_words", "bad_words", "top_k", "top_p", "stream", "pad_id"}),
    ):
        config = client.get_model_config(model).config
        assert config.model_transaction_policy.decoupled
        assert needed <= {tensor.name for tensor in config.input}
    assert {"output_ids", "sequence_length"} <= {t.name for t in client.get_model_config("tensorrt_llm").config.output}


def test_metrics(served: Served) -> None:
    before = served.settled()
    assert ask(served, GOOD | {"request_output_len": 33}).tokens
    served.metric_becomes(ENDED, lambda count: count == before[ENDED] + 1)
    after = served.metrics()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed["replayssm_generated_tokens_total"] == 33
    assert changed["replayssm_prompt_tokens_total"] == 3
    assert changed["replayssm_decode_steps_total"] == 32
    # A window of 8 tokens: the prompt is folded, and then every 8th token brings a flush.
    assert changed["replayssm_state_rewrites_total"] == 1 + 32 // 8
    for name in ("queue", "time_to_first_token", "time_per_output_token", "request"):
        assert changed[f"replayssm_{name}_seconds_count"] == 1
        assert after[f"replayssm_{name}_seconds_sum"] > 0
    assert after["replayssm_slots"] == 6
    accepted, steps = (after[f"replayssm_{name}_total"] for name in ("accepted_draft_tokens", "decode_steps"))
    assert after["replayssm_acceptance_length"] == pytest.approx(1 + accepted / steps)


def test_threads_do_not_pile_up(served: Served) -> None:
    """Memory and threads of the model's process stay as they are over many requests."""
    model = next(iter(with_command(served.family(), "python_backend_stub")))

    def round_() -> tuple[int, int]:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: ask(served, GOOD), range(60)))
        return model.num_threads(), model.memory_info().rss

    round_()
    threads, memory = round_()
    later = round_()
    assert later[0] <= threads + 1
    assert later[1] <= memory + (8 << 20)
    assert threading.active_count() < 100
