"""The recipe of the small models: its fast forms compute what transformers does, and what it writes converts and runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.demo.models import open_time_step, write_tokenizer
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine_config import BuildOptions

sys.path.append(str(Path(__file__).parents[1] / "examples" / "train_tiny"))

import tiny_corpus
import train
from chunked_forms import FORMS, chunked_forms
from tiny_models import MODELS
from tiny_training import MASKS, RISE, Plan, Step

RUN_ALL = Path(__file__).parents[1] / "examples" / "train_tiny" / "run_all.sh"
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# ---- forms of the recurrences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_chunked_forms_have_the_values_and_gradients_of_transformers(name: str) -> None:
    """Over chunks and a part of one; the text is as long as three chunks of 16 and no multiple of anything."""
    model = train.make_model(name, 0, CPU).train()
    ids = torch.randint(3, 259, (2, 75), generator=torch.Generator().manual_seed(1))

    def outputs_and_gradients(attention_mask: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        logits.square().mean().backward()
        return logits.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    own, own_gradients = outputs_and_gradients(None)
    with chunked_forms(model):
        fast, gradients = outputs_and_gradients(MASKS)
    assert own.std() > 0.1
    torch.testing.assert_close(fast, own, rtol=0, atol=2e-5)
    assert gradients.keys() == own_gradients.keys() and any("A_log" in key for key in gradients)
    largest = max(gradient.norm() for gradient in own_gradients.values())
    for key, gradient in own_gradients.items():
        assert (gradients[key] - gradient).norm() < 1e-4 * gradient.norm() + 1e-6 * largest, key


def test_forms_are_put_back() -> None:
    model = train.make_model("kda", 0, META)
    module = sys.modules[type(model).__module__]
    before = {name: getattr(module, name) for name in FORMS if hasattr(module, name)}
    with pytest.raises(RuntimeError, match="inside"), chunked_forms(model):
        assert {getattr(module, name) for name in before}.isdisjoint(before.values())
        raise RuntimeError("inside")
    assert {name: getattr(module, name) for name in before} == before


def test_forms_refuse_states() -> None:
    k = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="neither take nor return"):
        FORMS["chunk_kimi_delta_attention"](k, k, k, -k.abs(), k[..., 0].sigmoid(), output_final_state=True)
    with pytest.raises(ValueError, match="no recurrence"), chunked_forms(torch.nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_a_step_neither_waits_for_the_device_nor_reads_it(name: str) -> None:
    """As a CUDA graph must not: on the device meta, which has no values, a step that looks at one fails."""
    model = train.make_model(name, 0, META).train()
    step = Step(model, torch.optim.SGD(model.parameters(), lr=1.0), 2, 96)
    with chunked_forms(model):
        step.run()
    assert all(p.grad is not None and p.grad.device == META for p in model.parameters())


# ---- corpus and plan -------------------------------------------------------------------------------------------------


def test_bytes_have_the_tokens_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    table, text = tiny_corpus.byte_tokens(tokenizer), "def f(x):\n\treturn 'Ünïcödé 文字 🙂'\r\n"
    assert table[list(text.encode())].tolist() == tokenizer.encode(text).ids
    never = [0xC0, 0xC1, *range(0xF5, 0x100)]
    assert [byte for byte in range(256) if table[byte] < 0] == never


def test_held_out_files_are_not_trained_on(tokenizer: Tokenizer) -> None:
    corpus = tiny_corpus.read_corpus(tokenizer)
    files = dict(tiny_corpus.library_files())
    held_out = sorted(name for name in files if tiny_corpus.is_held_out(name))
    assert corpus.files == (len(files) - len(held_out), len(held_out))
    assert 0.02 < len(held_out) / len(files) < 0.1
    assert corpus.held_out.encode() == b"".join(files[name] for name in held_out)
    trained = sum(len(content) + 1 for name, content in files.items() if name not in held_out)
    assert len(corpus.trained) == trained
    assert (corpus.trained == tiny_corpus.END_OF_FILE).sum() == corpus.files[0]
    assert not any("test" in name.split("/") or "site-packages" in name for name in files)


def test_the_rate_rises_and_falls_to_nothing() -> None:
    plan = Plan(10, 1.0, 64, ((0.0, 8), (0.8, 32)), 2e-3, 0)
    assert plan.rate(0.0) == 0 and plan.rate(1.0) == 0 and plan.rate(RISE) == pytest.approx(2e-3)
    assert plan.rate(RISE / 2) == pytest.approx(1e-3) and plan.rate((1 + RISE) / 2) == pytest.approx(1e-3)
    assert [plan.context(progress) for progress in (0.0, 0.79, 0.8, 1.0)] == [8, 8, 32, 32]


# ---- the script ------------------------------------------------------------------------------------------------------


SHORT = "--device cpu --steps 20 --context_len 64 --long_context_len 128 --batch_bytes 256 --eval_bytes 512".split()


@pytest.mark.parametrize("name", ["gated_delta", "kda"])
def test_a_short_run_learns_converts_and_writes_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", name, "--output_dir", str(tmp_path), *SHORT])
    assert train.main() == 0
    check_run(name, tmp_path)


def test_one_line_runs_everything_from_a_checkout(tmp_path: Path) -> None:
    few = "--device cpu --context_len 12 --rows 1 --windows 4 --only window"
    environment = {"PYTHON": sys.executable, "NAMES": "mamba2", "TRAIN_ARGS": " ".join(SHORT), "ACCURACY_ARGS": few}
    done = subprocess.run(
        ["bash", RUN_ALL, tmp_path / "out"],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "accuracy" / "mamba2.json").read_text())
    assert len(report["results"]) > 5
    check_run("mamba2", tmp_path / "out")


def check_run(name: str, output: Path) -> None:
    """What a short run wrote: it has learnt, its card tells the truth, and its model converts, builds and generates."""
    folder = output / name
    record = json.loads((folder / "training.json").read_text())
    losses = [entry["bits_per_byte"] for entry in record["losses"]]
    assert len(losses) == 20 and losses[0] > 7.5 and min(losses[-5:]) < losses[0] - 2
    assert 2e6 < record["parameters"] < 4e6

    assert (
        record["command"][2:5] == [name, "--output_dir", "OUTPUT"]
        and str(output) not in (folder / "README.md").read_text()
    )
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}

    # The card's figure is what transformers makes of the saved weights, with its own forms.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    open_time_step(model)
    saved = next(model.parameters()).detach()
    assert torch.equal(saved, saved.bfloat16().float())
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode((output / "held_out.txt").read_text()[:512]).ids
    pieces = torch.tensor(ids[:512]).view(-1, 64)
    with torch.no_grad():
        loss = model(input_ids=pieces, labels=pieces, use_cache=False).loss
    assert record["held_out_bits_per_byte"] == pytest.approx(loss.item() / math.log(2), rel=1e-4)
    assert f"| {record['held_out_bits_per_byte']:.4f} bits a byte" in (folder / "README.md").read_text()

    convert(folder, output / "checkpoint")
    build_engine(output / "checkpoint", output / "engine", BuildOptions(1, 64))
    (generated,) = LLM(output / "engine", device="cpu").generate(["import os\n"], SamplingParams(max_tokens=8))
    assert 1 <= len(generated.outputs[0].token_ids) <= 8


def test_time_ends_a_run(tokenizer: Tokenizer) -> None:
    model = train.make_model("mamba2", 0, CPU)
    text = torch.randint(3, 259, (500,))
    reported = list(train.train(model, text, Plan(100_000, 0.5, 32, ((0.0, 16),), 1e-3, 0)))
    assert reported[0][0] == 0 and reported[-1][1] == 1.0 and 1 <= reported[-1][0] < 500


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--long_share", "1"], ["--eval_bytes", "8"], ["--context_len", "1"]]
)
def test_wrong_sizes_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse(["kda", "--output_dir", "x", *arguments])
    # The usage above it names every option.
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_diverges_writes_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    arguments = ["kda", "--output_dir", str(tmp_path), *SHORT, "--learning_rate", "1e8"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    assert train.main() == 1
    assert "error: the loss is nan at step" in capsys.readouterr().err and not (tmp_path / "kda").exists()


def test_other_folders_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "kda").mkdir()
    (tmp_path / "kda" / "thesis.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["train.py", "kda", "--output_dir", str(tmp_path), "--device", "cpu"])
    assert train.main() == 1
    assert capsys.readouterr().err.startswith("error: ") and (tmp_path / "kda" / "thesis.txt").read_text() == "mine"
