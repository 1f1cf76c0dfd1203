"""Generation: independence of the batch, limits, stop strings, streaming, logits, and the command."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from safetensors.torch import load_file

from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.cli.generate import read_rows
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tokenizer import TextStream, Tokenizer

PROMPTS = ["Hello", "A", "The quick brown fox jumps over the lazy dog", "ünï", "state space " * 8]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer kind, byte tokenizer, padded vocabulary; 3 slots, prompts cut every 16 tokens."""
    options = BuildOptions(max_batch_size=3, max_seq_len=160, max_num_tokens=48)
    return synthetic.write_engine(tmp_path_factory.mktemp("generate") / "engine", options=options, text=True)


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> LLM:
    return LLM(engine_dir, device="cpu")


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine without a tokenizer."""
    return synthetic.write_engine(tmp_path_factory.mktemp("wordless") / "engine")


def run(llm: LLM, prompts: Any, **params: Any) -> list[RequestOutput]:
    """Always a list, never ended by the end token unless asked for."""
    outputs = llm.generate(prompts, SamplingParams(**{"end_id": -1, "max_tokens": 12} | params))
    return outputs if isinstance(outputs, list) else [outputs]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- independence of the batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 11}, {"top_k": 5}, {"top_p": 0.7, "temperature": 2}]
)
def test_five_prompts_together_equal_each_alone(llm: LLM, params: dict[str, Any]) -> None:
    together = run(llm, PROMPTS, **params)
    assert [output.prompt for output in together] == PROMPTS
    assert [output.request_id for output in together] == [0, 1, 2, 3, 4]
    alone = [run(llm, prompt, **params)[0] for prompt in PROMPTS]
    assert ids(together) == ids(alone)
    assert ids(run(llm, PROMPTS[::-1], **params)) == ids(alone)[::-1]
    assert [o.outputs[0].text for o in together] == [o.outputs[0].text for o in alone]


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    first, again, other = (ids(run(llm, PROMPTS, temperature=1.0, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert all(a != b for a, b in zip(first, other))


def test_requests_of_different_lengths_share_the_slots(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, end_id=-1) for n in (1, 30, 2, 7, 3, 19, 1)]
    prompts = [[2 + i] * (1 + 9 * i) for i in range(7)]
    outputs = llm.generate(prompts, params)
    assert [len(tokens) for tokens in ids(outputs)] == [1, 30, 2, 7, 3, 19, 1]  # type: ignore[arg-type]
    for prompt, param, output in zip(prompts, params, outputs):  # type: ignore[call-overload]
        assert ids([output]) == ids([llm.generate(prompt, param)])  # type: ignore[list-item]


def test_logits_are_those_the_tokens_were_chosen_from(llm: LLM) -> None:
    """The same as one pass over prompt and output, and -inf where ids only pad the vocabulary."""
    for output in run(llm, PROMPTS, temperature=1.0, return_generation_logits=True):
        completion, session = output.outputs[0], Session(llm.engine)
        logits = completion.generation_logits
        assert logits is not None
        assert logits.shape == (12, synthetic.TEXT_VOCAB_SIZE)
        assert logits.dtype == torch.float32
        pieces = []
        tokens = torch.tensor([output.prompt_token_ids + completion.token_ids])
        for piece in tokens.split(48, 1):
            pieces.append(session.step(piece, modes=[RowMode.ABSORB])[0])
            session.commit(0, [piece.shape[1]])
        expected = torch.cat(pieces)[len(output.prompt_token_ids) - 1 : -1]
        known = synthetic.TEXT_TOKENS
        torch.testing.assert_close(logits[:, :known], expected[:, :known], rtol=0, atol=1e-4)
        assert (logits[:, known:] == -torch.inf).all()
        assert max(completion.token_ids) < known


# ---- where a text ends -----------------------------------------------------------------------------------------------


def test_ends_by_length_by_token_and_by_room(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    free = run(llm, "Hello")[0].outputs[0]
    assert (free.finish_reason, free.stop_reason, len(free.token_ids)) == ("length", None, 12)
    end = free.token_ids[5]
    first = free.token_ids.index(end)
    for params in ({"end_id": end}, {"stop_token_ids": [end]}):
        stopped = run(llm, "Hello", **params)[0].outputs[0]
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", end)
    assert run(llm, "Hello", end_id=end, ignore_eos=True)[0].outputs[0].token_ids == free.token_ids
    with caplog.at_level(logging.WARNING):
        full = run(llm, [[2] * 150], max_tokens=50)[0].outputs[0]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 10)
    assert "limited to 10 tokens" in caplog.text


class Script:
    """A request that is fed chosen bytes instead of a model's tokens."""

    def __init__(self, engine_dir: Path, **params: Any) -> None:
        self.tokenizer = Tokenizer(engine_dir)
        stream = TextStream(self.tokenizer, skip_special_tokens=True)
        self.request = Request(0, [0], SamplingParams(**{"max_tokens": 1000} | params), frozenset([1]), stream)

    def feed(self, token_ids: list[int]) -> list[str]:
        """What is shown after each token, until the request ends."""
        pieces = []
        for token in token_ids:
            self.request.append(token)
            pieces.append(self.request.tell())
            if self.request.finish_reason is not None:
                break
        return pieces

    def say(self, text: str, *end: int) -> list[str]:
        return self.feed(self.tokenizer.encode(text) + list(end))


def test_characters_are_shown_whole(engine_dir: Path) -> None:
    script = Script(engine_dir)
    assert script.say("aé漢🎉", 1) == ["a", "", "é", "", "", "漢", "", "", "", "🎉", ""]
    assert script.request.output().text == "aé漢🎉"


def test_bytes_that_never_become_a_character_are_replaced(engine_dir: Path) -> None:
    script = Script(engine_dir)
    broken = script.tokenizer.encode("漢")[:2] + script.tokenizer.encode("x") + script.tokenizer.encode("é")[:1] + [1]
    pieces = script.feed(broken)
    assert "".join(pieces) == "\ufffdx\ufffd"
    assert pieces[:2] == ["", ""]
    assert script.request.output().text == "\ufffdx\ufffd"


@pytest.mark.parametrize(
    ("stop", "word"),
    [(["lo w"], "lo w"), (["xyz", "o"], "o"), (["orld", "lo wor"], "lo wor"), (["lo", "l"], "l"), ("d", "d")],
)
def test_stop_strings_end_the_text_before_them_and_are_never_shown(
    engine_dir: Path, stop: list[str] | str, word: str
) -> None:
    script, text = Script(engine_dir, stop=stop), "hello world"
    pieces, output = script.say(text), script.request.output()
    assert (output.finish_reason, output.stop_reason) == ("stop", word)
    assert "".join(pieces) == output.text == text[: text.find(word)]


def test_text_that_only_began_like_a_stop_string_is_shown_in_the_end(engine_dir: Path) -> None:
    script = Script(engine_dir, stop="world!")
    assert script.say("a wor", 1) == ["a", " ", "", "", "", "wor"]
    script = Script(engine_dir, stop="world!")
    assert "".join(script.say("wow world.", 1)) == script.request.output().text == "wow world."


def test_stop_string_in_an_engine(llm: LLM) -> None:
    free = run(llm, "Hello", temperature=1.0)[0].outputs[0]
    word = free.text[3:6]
    stopped = run(llm, "Hello", temperature=1.0, stop=word)[0].outputs[0]
    assert stopped.text == free.text[: free.text.find(word)]
    assert stopped.stop_reason == word
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_streamed_pieces_are_the_text(llm: LLM) -> None:
    pieces: dict[int, list[str]] = {}
    outputs = llm.generate(
        PROMPTS, SamplingParams(max_tokens=40, temperature=1.0), lambda i, text: pieces.setdefault(i, []).append(text)
    )
    for output in outputs:  # type: ignore[union-attr]
        assert "".join(pieces.get(output.request_id, [])) == output.outputs[0].text
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert max(map(len, pieces.values())) > 5


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_in_every_form(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Hello")
    forms: list[Any] = ["Hello", tokens, {"prompt": "Hello"}, {"prompt_token_ids": tokens}, {"input_ids": tokens}]
    outputs = run(llm, forms)
    assert len({tuple(t) for t in ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["Hello", None, "Hello", None, None]
    assert isinstance(llm.generate("Hello", SamplingParams(max_tokens=1)), RequestOutput)
    assert isinstance(llm.generate(tokens, SamplingParams(max_tokens=1)), RequestOutput)
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([[]], "prompt 0 is empty"),
        (["fine", ""], "prompt 1 is empty"),
        ([[3, 263]], "token id 263; the model has ids 0 to 257"),
        ([[3, 258]], "token id 258"),
        ([[-1]], "token id -1"),
        ([[1.5]], "token id 1.5"),
        ([[2] * 160], "max_seq_len 160 leaves no room"),
        ([{"text": "x"}], "must have one of"),
        ([{"prompt": "x", "input_ids": [1]}], "must have one of"),
        ([{"prompt": [1]}], "prompt is a list"),
        ([{"input_ids": "x"}], "input_ids is a str"),
        ([3.5], "prompt 0 is a float"),
    ],
)
def test_prompts_that_cannot_be_run_are_refused_before_anything_runs(llm: LLM, prompt: Any, match: str) -> None:
    before = llm.session.host.clone()
    with pytest.raises(UserError, match=match):
        llm.generate(prompt)
    assert torch.equal(llm.session.host, before)


def test_end_tokens_that_do_not_exist_are_refused(llm: LLM) -> None:
    for params in (SamplingParams(end_id=99999), SamplingParams(stop_token_ids=[99999])):
        with pytest.raises(UserError, match="end token 99999 does not exist"):
            llm.generate([[1, 2]], params)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(UserError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_text_without_a_tokenizer_is_refused_and_ids_are_not(wordless: Path) -> None:
    llm = LLM(wordless, device="cpu")
    with pytest.raises(UserError, match=r"has no tokenizer.json") as caught:
        llm.generate("Hello")
    assert "input_ids" in caught.value.hint
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        llm.generate([[1]], SamplingParams(stop="x"))
    output = llm.generate([1, 2, 3])
    assert isinstance(output, RequestOutput)
    assert output.outputs[0].text == ""


def test_tokenizer_options_that_would_change_a_prompt_are_off(engine_dir: Path, tmp_path: Path) -> None:
    data = json.loads((engine_dir / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer(tmp_path).encode("Hello world")) == 11
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read"):
        Tokenizer(tmp_path)


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    line = [sys.executable, "-m", "trtllm_replayssm", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_one_prompt_is_written_as_text(engine_dir: Path, llm: LLM) -> None:
    done = command("generate", "--engine_dir", engine_dir, "--input_text", "Hello", "--max_output_len", "9")
    assert done.returncode == 0, done.stderr
    output = llm.generate("Hello", SamplingParams(max_tokens=9))
    assert isinstance(output, RequestOutput)
    assert done.stdout == output.outputs[0].text + "\n"
    assert "9 tokens of 1 request(s)" in done.stderr
    assert "tokens/s" in done.stderr


def test_user_errors_are_one_line_and_a_hint(engine_dir: Path, wordless: Path, tmp_path: Path) -> None:
    for words in (
        ("--engine_dir", tmp_path / "none", "--input_text", "x"),
        ("--engine_dir", wordless, "--input_text", "x"),
        ("--engine_dir", engine_dir, "--input_text", "x", "--temperature", "nan"),
    ):
        done = command("generate", *words)
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert lines[0].startswith("error: ")
        assert len(lines) <= 2
        assert done.stdout == ""
    assert command("generate", "--engine_dir", engine_dir).returncode == 2


def test_rows_of_a_file(engine_dir: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, results, logits = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "logits.safetensors"
    rows.write_text('{"prompt": "Hello"}\n\n{"input_ids": [5, 6, 7]}\n' + '{"prompt": "ünï"}\n' * 3)
    sampling = ["--temperature", "0.9", "--top_k", "20", "--top_p", "0.9", "--random_seed", "4", "--end_id", "-1"]
    base = ["generate", "--engine_dir", str(engine_dir), "--input_file", str(rows), "--max_output_len", "6", *sampling]
    files = ["--output_file", str(results), "--generation_logits_file", str(logits), "--device", "cpu"]
    assert main([*base, *files]) == 0
    assert capsys.readouterr().out == ""
    written = [json.loads(line) for line in results.read_text().splitlines()]
    prompts: list[Any] = ["Hello", [5, 6, 7], "ünï", "ünï", "ünï"]
    expected = run(llm, prompts, max_tokens=6, temperature=0.9, top_k=20, top_p=0.9, seed=4)
    for row, output in zip(written, expected):
        completion = output.outputs[0]
        assert row == {"output_ids": completion.token_ids, "text": completion.text, "finish_reason": "length"}
    tensors = load_file(logits)
    assert sorted(tensors) == ["0", "1", "2", "3", "4"]
    assert all(t.shape == (6, 263) and t.dtype == torch.float32 for t in tensors.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "logits.safetensors", "out.jsonl"]
    assert main(base) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == written


def test_rows_without_a_tokenizer_have_no_text(
    wordless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"input_ids": [5, 6, 7]}\n')
    assert main(["generate", "--engine_dir", str(wordless), "--input_file", str(tmp_path / "in.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["text"] is None


def test_several_prompts_are_told_apart(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input_text", "Hello", "--input_text", "A", "--max_output_len", "1", "--stop", "x", "--stop", "yy"]
    assert main(["generate", "--engine_dir", str(engine_dir), *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[0] Hello")
    assert "\n[1] A" in out


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "a\tb"}', "is not JSON: Invalid control character at column 14"),
        ("[1]", "found list"),
        ('{"prompt": "a", "input_ids": [1]}', "found ['input_ids', 'prompt']"),
        ('{"promt": "a"}', "found ['promt']"),
        ('{"prompt": 3}', "prompt is not a string"),
        ('{"input_ids": "3"}', "input_ids is not a list of integers"),
        ('{"input_ids": [true]}', "input_ids is not a list of integers"),
        ('{"input_ids": [' + "9" * 5000 + "]}", "cannot be read: Exceeds the limit"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ('{"prompt": "ab\\ud800"}', "prompt is not Unicode text: character 3 is '\\ud800'"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 13 is 0xff"),
    ],
)
def test_bad_rows_are_named_by_line(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str | bytes, match: str
) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    base = ["generate", "--engine_dir", str(engine_dir), "--input_file", str(tmp_path / "in.jsonl")]
    assert main([*base, "--output_file", str(tmp_path / "out.jsonl")]) == 1
    error = capsys.readouterr().err.splitlines()[0]
    assert "in.jsonl line 3" in error
    assert match in error
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_read_or_written(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["generate", "--engine_dir", str(engine_dir), "--input_text", "a"]
    for words, match in (
        ([*text, "--output_file", str(tmp_path / "no/out.jsonl")], "is not a folder"),
        ([*text, "--generation_logits_file", str(tmp_path)], "is a folder"),
        ([*text[:3], "--input_file", str(tmp_path / "none.jsonl")], "cannot be read: No such file"),
    ):
        assert main(words) == 1
        assert match in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main([*text[:3], "--input_file", str(tmp_path / "empty.jsonl")]) == 1
    assert "holds no rows" in capsys.readouterr().err


def test_line_separators_of_unicode_do_not_end_a_row(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\r\n', encoding="utf-8", newline="")
    assert read_rows(tmp_path / "in.jsonl") == [{"prompt": "a\u2028b\x85c"}]


def test_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert read_rows(tmp_path / "in.jsonl") == [{"prompt": "a"}]


def test_files_must_not_overwrite_each_other(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, link = tmp_path / "in.jsonl", tmp_path / "link"
    rows.write_text('{"input_ids": [1, 2]}\n')
    link.symlink_to(rows)
    out = tmp_path / "out"
    for files in (["--output_file", link], ["--output_file", out, "--generation_logits_file", tmp_path / "." / "out"]):
        words = ["generate", "--engine_dir", engine_dir, "--input_file", rows, *files]
        assert main([str(word) for word in words]) == 1
        assert "are the same file" in capsys.readouterr().err
    assert rows.read_text() == '{"input_ids": [1, 2]}\n'
    assert not out.exists()


def test_prompt_that_is_not_unicode_is_refused(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As ``sys.argv`` has it when the shell passes bytes that are not UTF-8."""
    assert main(["generate", "--engine_dir", str(engine_dir), "--input_text", "a\udcff bad"]) == 1
    assert "the prompt is not Unicode text: character 2 is '\\udcff'" in capsys.readouterr().err


def test_a_least_length_that_is_too_long_is_refused_by_its_option(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["generate", "--engine_dir", str(engine_dir), "--input_text", "a", "--max_output_len", "4"]
    assert main([*base, "--min_tokens", "5"]) == 1
    assert "error: --min_tokens 5 is more than --max_output_len 4\n" in capsys.readouterr().err
    assert main([*base, "--min_tokens", "4"]) == 0


@pytest.mark.parametrize(("option", "value", "least"), [("--max_output_len", "0", 1), ("--random_seed", "-1", 0)])
def test_numbers_that_are_too_small_are_refused_by_name(
    engine_dir: Path, option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--engine_dir", str(engine_dir), "--input_text", "a", option, value]) == 1
    assert capsys.readouterr().err == f"error: {option} is {value}; it must be {least} or more\n"


def test_a_damaged_engine_is_an_error_and_no_text(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(engine_dir, tmp_path / "engine")
    content = bytearray((folder / "rank0.engine").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = b"\xff" * (len(content) - header)
    (folder / "rank0.engine").write_bytes(content)
    assert main(["generate", "--engine_dir", str(folder), "--input_text", "a", "--max_output_len", "2"]) == 1
    captured = capsys.readouterr()
    assert captured.out.strip() == ""
    assert captured.err.startswith("error: the model computed values that are no numbers (NaN, or infinite)\nhint: ")


def test_full_device_is_one_sentence(engine_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "--engine_dir", str(engine_dir), "--input_text", "a", "--max_output_len", "2"]
    for option in ("--output_file", "--generation_logits_file"):
        assert main([*base, option, "/dev/full"]) == 1
        assert "error: /dev/full cannot be written: No space left on device\n" in capsys.readouterr().err


def test_build_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = synthetic.write_checkpoint(tmp_path / "checkpoint", synthetic.decoder())
    base = ["build", "--checkpoint_dir", str(source), "--output_dir", str(tmp_path / "an engine")]
    base += ["--engine_flavour", "embedded"]
    limits = ["--max_batch_size", "2", "--max_seq_len", "99", "--max_num_tokens", "50", "--replay_window", "5"]
    assert main([*base, *limits]) == 0
    (following,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["next"])
    assert shlex.split(following)[:5] == [
        "next",
        "trtllm-replayssm",
        "generate",
        "--engine_dir",
        str(tmp_path / "an engine"),
    ]
    config = LLM(tmp_path / "an engine", device="cpu").engine.config
    assert (config.max_batch_size, config.max_seq_len, config.max_num_tokens) == (2, 99, 50)
    assert config.replay.window == 5


def test_package_is_imported_without_torch() -> None:
    code = "import sys, trtllm_replayssm; assert 'torch' not in sys.modules; trtllm_replayssm.SamplingParams()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
