"""The demo: its proofs hold for every recurrence, and fail when what they prove is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from trtllm_replayssm.cli.demo import chosen
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.demo import models, proofs
from trtllm_replayssm.demo import subject as subjects
from trtllm_replayssm.demo.catalogue import MODELS, SPECIAL_TOKENS, TRAINED, VOCAB_SIZE
from trtllm_replayssm.demo.proofs import Demo, Proof, equal, run_demo
from trtllm_replayssm.demo.subject import TRAINED_FOLDER, random_subject, trained_subject
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.session import Session


@pytest.mark.parametrize("name", [*MODELS, *TRAINED])
def test_every_proof_holds(name: str, tmp_path: Path) -> None:
    subject = trained_subject(name) if name in TRAINED else random_subject(name)
    report = run_demo(subject, tmp_path / name)
    assert [proof.claim for proof in report.proofs if not proof.holds] == []
    assert len(report.proofs) == 12
    assert report.text.startswith(subject.prompts[0]) if subject.trained else report.text == ""
    if subject.trained:
        # Python in its outline: indented lines, of words that the library uses.
        words = re.findall(r"[a-z]{3,}", report.text.removeprefix(subject.prompts[0]))
        library = set(re.findall(r"[a-z]{3,}", (TRAINED_FOLDER / "held_out.txt").read_text()))
        assert len(words) > 10 and sum(word in library for word in words) > 0.7 * len(words)
        assert report.text.count("\n    ") > subject.prompts[0].count("\n    ")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo.prepare(random_subject("nemotron_h"), tmp_path_factory.mktemp("demo") / "run")


def failed(proofs_found: Iterator[Proof]) -> set[str]:
    return {proof.claim for proof in proofs_found if not proof.holds}


def test_wrong_weight_is_noticed(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: Any = demo.llm.engine.weights
    name = "transformer.layers.0.mamba2.norm.weight"
    monkeypatch.setitem(weights, name, weights[name] * 1.01)
    assert f"prefill and {proofs.STEPS} decode steps equal transformers" in failed(demo.prove())


def test_rejected_drafts_that_stay_are_noticed(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_all(session: Session, first_slot: int, accepted: Any) -> None:
        here = slice(first_slot, first_slot + len(accepted))
        counts = session.pending[here].clone()
        session.host[here, 0] += counts
        session.cursors[here, 0] += counts
        session.settle(here)

    monkeypatch.setattr(Session, "commit", keep_all)
    claims = failed(demo.prove())
    assert [claim for claim in claims if claim.startswith("verify steps with")]
    assert f"prefill and {proofs.STEPS} decode steps equal transformers" not in claims


def test_state_written_behind_the_cursor_is_noticed(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def scribbling(session: Session, *args: Any, **options: Any) -> torch.Tensor:
        logits = step(session, *args, **options)
        for name, pool in session.pools.items():
            if name.endswith(".state"):
                pool[0] *= 1 + 1e-6
        return logits

    monkeypatch.setattr(Session, "step", scribbling)
    assert "a checkpoint changes in memory exactly when its cursor says so" in failed(demo.prove())


def test_nan_never_equals() -> None:
    ones = torch.ones(3)
    assert equal("same", ones, ones).holds
    assert not equal("nan", ones * float("nan"), ones).holds
    assert not equal("far", ones + 1e-3, ones).holds
    assert not equal("no draft was rejected", ones, ones, and_also=False).holds


def test_tokenizer_gives_back_every_byte(demo: Demo) -> None:
    tokenizer = Tokenizer.from_file(str(demo.llm.engine.folder / "tokenizer.json"))
    text = "plain, Zeitüberschreitung, 状態, \U0001f9ca\t\x00\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 256 + len(SPECIAL_TOKENS) < VOCAB_SIZE
    assert demo.llm.engine.config.checkpoint.num_tokens == 256 + len(SPECIAL_TOKENS)


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        run_demo(random_subject("nemotron_h"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_command_fails_with_a_proof(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [Proof("two is two", "2", True), Proof("two is three", "2", False)]
    monkeypatch.setattr(proofs, "run_demo", lambda chosen, folder: proofs.Report(found, "cpu", 1.0, "def f"))
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out and "mamba2 makes of it:\n\ndef f\n" in captured.out
    assert captured.err == "error: 1 of 2 proofs failed\n"


def test_what_is_changed_of_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(models.LOGGER, "info", said.append)
    for name in TRAINED:
        models.load_checkpoint(TRAINED_FOLDER / name)
    assert said == [models.FLOOR_LIFTED]


def test_a_checkout_has_trained_models_and_a_wheel_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(None, None).name == "mamba2" and chosen("kda", None).name == "kda"
    assert not chosen(None, "qwen3_next").trained
    monkeypatch.setattr(subjects, "TRAINED_FOLDER", tmp_path)
    without = chosen(None, None)
    assert without.name == "nemotron_h" and not without.trained and "random weights" in without.what
    assert main(["demo", "--trained_model", "kda"]) == 1
    assert "error: this installation has no trained model kda" in capsys.readouterr().err


def test_drafts_without_a_gain_prove_nothing(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "SpeculationOptions", lambda mode: None)
    run = proofs.greedy(demo.llm.session, proofs.Meter(demo.llm.session), demo.prompts, proofs.STEPS)
    trained = replace(demo, subject=replace(demo.subject, trained=True))
    plain, drafted = trained.generated(run)
    # Without a drafter the text is right, and a step makes one token.
    assert plain.holds and "2 of 2 texts, in steps of 1.00 tokens" in drafted.measured and not drafted.holds
