"""validate: every claim holds here for the embedded flavour, and what does not hold is said, and fails the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.cli.validate import CHECK_CHOICES, FAMILY_CHOICES
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.validation import models
from trtllm_replayssm.validation.catalogue import MODELS, families_without_model, family_of
from trtllm_replayssm.validation.checks import CHECKS, Outcome, close
from trtllm_replayssm.validation.models import random_weights
from trtllm_replayssm.validation.report import validate
from trtllm_replayssm.validation.subject import Settings, Subject

SETTINGS = Settings("embedded", steps=20, device="cpu")
EMBEDDED = ("validate", "--engine_flavour", "embedded", "--device", "cpu", "--steps", "20")


def statuses(report: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for result in report["results"]:
        found.setdefault(result["check"], set()).add(result["status"])
    return found


def test_every_check_runs_and_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model with every kind of layer that Nemotron-H has; what asks for TensorRT or CUDA graphs is skipped, and said so."""
    file = tmp_path / "report.json"
    assert main([*EMBEDDED, "--family", "nemotron_h", "--output_file", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["passed"]
    assert (report["engine_flavour"], report["device"]) == ("embedded", "cpu")
    assert statuses(report) == {
        check: {"skipped"} if check in ("graphs", "aliases") else {"passed"} for check in CHECKS
    }
    assert report["machine"]["torch"].startswith(torch.__version__)
    out = capsys.readouterr().out
    assert "rejected equal the run without drafts" in out
    assert "FAILED" not in out


@pytest.mark.parametrize("family", ["kimi_linear", "glm5_next"])
def test_without_transformers_the_models_are_made_here(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's text model is a part of its config."""
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    report = validate([family], SETTINGS, tmp_path, ("transformers", "embedded", "rollback"))
    found = statuses(report.to_dict())
    assert found == {"transformers": {"skipped"}, "embedded": {"passed"}, "rollback": {"passed"}}


def test_short_types_are_judged_by_norms(tmp_path: Path) -> None:
    settings = Settings("embedded", "bfloat16", 20, "cpu")
    report = validate(["mamba2"], settings, tmp_path, ("transformers", "generate", "rollback"))
    assert statuses(report.to_dict()) == {"transformers": {"passed"}, "generate": {"skipped"}, "rollback": {"passed"}}
    assert "relative norm" in report.results[0].measured


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_read_without_transformers(name: str) -> None:
    """The arguments are a whole config.json, and the weights that are drawn have every parameter."""
    values = {"architectures": [MODELS[name].model_class], **MODELS[name].arguments}
    family = find_family(values, {})
    assert type(family) is family_of(name)
    decoder = family.decoder()
    shapes = {key: tuple(weight.shape) for key, weight in random_weights(decoder).items()}
    assert shapes == {key: parameter.shape for key, parameter in decoder.parameters().items()}


def test_the_command_names_every_model_and_check() -> None:
    assert tuple(MODELS) == FAMILY_CHOICES
    assert tuple(CHECKS) == CHECK_CHOICES
    assert families_without_model() == []


def test_families_that_are_not_checked_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trtllm_replayssm.validation import report

    monkeypatch.setattr(report, "families_without_model", lambda: ["OtherForCausalLM"])
    assert main([*EMBEDDED, "--family", "mamba2", "--check", "versions"]) == 0
    assert "warning: not checked, because there is no tiny model: OtherForCausalLM" in capsys.readouterr().err


def test_wrong_steps_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine whose verify steps are wrong: what hangs on them fails, the rest holds, and the report is written."""
    step = Session.step

    def wrong(session: Session, token_ids: Any, *args: Any, **options: Any) -> torch.Tensor:
        logits = step(session, token_ids, *args, **options)
        return logits + 0.01 if len(token_ids[0]) == 4 else logits

    monkeypatch.setattr(Session, "step", wrong)
    file = tmp_path / "report.json"
    checks = ("--check", "embedded", "rollback", "resume")
    assert main([*EMBEDDED, "--family", "mamba2", *checks, "--output_file", str(file)]) == 1
    report = json.loads(file.read_text())
    assert not report["passed"]
    assert statuses(report) == {"embedded": {"passed"}, "rollback": {"passed", "failed"}, "resume": {"passed"}}
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert captured.err.endswith("claims failed\n")


def test_a_check_that_breaks_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(s: Subject) -> Iterator[Outcome]:
        yield Outcome("a first claim", "holds", True)
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setitem(CHECKS, "chunks", broken)
    heard: list[str] = []
    report = validate(["mamba2"], SETTINGS, tmp_path, ("chunks", "versions"), lambda result: heard.append(result.claim))
    assert [(r.claim, r.measured, r.status) for r in report.results[:2]] == [
        ("a first claim", "holds", "passed"),
        ("chunks runs to its end", "RuntimeError: a kernel failed", "failed"),
    ]
    assert {r.status for r in report.results[2:]} == {"passed"}
    assert heard == [r.claim for r in report.results]


def test_a_flavour_that_cannot_be_built_here_fails(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = validate(["mamba2", "nemotron_h"], Settings("tensorrt"), tmp_path)
    assert [(r.family, r.check, r.status) for r in report.results] == [
        ("mamba2", "build", "failed"),
        ("nemotron_h", "build", "failed"),
    ]
    assert "TensorRT" in report.results[0].measured or "tensorrt" in report.results[0].measured
    assert "--engine_flavour embedded" in report.results[0].measured
    assert not report.to_dict()["passed"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--steps", "5"), "error: --steps is 5; it must be 20 to 200"),
        (("--output_file", "missing/report.json"), "error: missing/report.json cannot be written"),
        (("--output_dir", "full"), "error: full is not empty"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    assert main([*EMBEDDED, *arguments]) == 1
    assert capsys.readouterr().err.startswith(sentence)


def test_closeness() -> None:
    ones = torch.linspace(-1, 1, 50)
    for dtype, near, far in (("float32", 5e-5, 1e-3), ("bfloat16", 1e-2, 1e-1)):
        assert close("same", ones, ones, dtype).holds
        assert close("near", ones + near, ones, dtype).holds
        assert not close("far", ones + far, ones, dtype).holds
        assert not close("nan", ones * float("nan"), ones, dtype).holds
        assert not close("no draft was rejected", ones, ones, dtype, and_also=False).holds
