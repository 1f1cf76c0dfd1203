"""The benchmark's parts that need no GPU: bytes, cursors, checks against the reference, results, files of the peers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Behind everything else: the package is to be found where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import __main__ as command
from benchmarks import measure, ours, problem, report
from benchmarks.cases import MODELS, Case, DeltaModel, Mamba2Model
from benchmarks.subject import Subject, Unavailable, Unsuited
from trtllm_replayssm.errors import UserError

SMALL = {
    "mamba2": Mamba2Model(4, 16, 32, 2),
    "gated_delta": DeltaModel(2, 4, dim=16),
    "kda": DeltaModel(2, 2, per_channel=True, dim=16),
}

#: With whole blocks of an fp8 copy.
WIDE = {"gated_delta": DeltaModel(2, 4, dim=32), "kda": DeltaModel(2, 2, per_channel=True, dim=32)}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    for module in (problem, ours, sys.modules["benchmarks.subject"]):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for kind, shape in SMALL.items():
        monkeypatch.setitem(MODELS[kind], "small", shape)
    measure.checked.cache_clear()
    measure.expected.cache_clear()


def case(
    kind: str = "mamba2", tokens: int = 1, model: str = "small", state: torch.dtype = torch.float32, batch: int = 2
):
    return Case(kind, model, batch, tokens, state)


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_layer_that_can_be_counted_by_hand():
    """Nemotron-3 Nano: 64 heads of 64 x 128 in float32 are 2 MiB; a ring row is x and B in 16 bits and dt."""
    nano = case(model="nemotron-3-nano", batch=1)
    row, token = (64 * 64 + 8 * 128) * 2 + 64 * 4, (2 * 64 * 64 + 2 * 8 * 128 + 64) * 2
    assert nano.step_bytes(0) == (2 << 20) + row + token
    assert nano.step_bytes(15) == 2 * (2 << 20) + 15 * row + token
    assert nano.standard_bytes() == nano.standard.step_bytes(0) == 2 * (2 << 20) + token
    mean = (2 << 20) * (1 + 1 / 16) + 7.5 * row + 15 / 16 * row + token
    assert nano.replay_bytes() == pytest.approx(mean)


def test_bytes_of_read_copies_that_can_be_counted_by_hand():
    """A copy is read by every step and written by folds, which move the checkpoint besides; prompts read that alone."""
    state, copies = 2 << 20, {"fp8": 64 * 64 * 128 * 33 // 32, "nvfp4": 64 * 64 * 128 * 9 // 16 + 4 * 64}
    for read_dtype, copy in copies.items():
        plain = case(model="nemotron-3-nano", batch=1)
        copied = replace(plain, read_dtype=read_dtype)
        assert copied.step_bytes(7) == plain.step_bytes(7) - state + copy
        assert copied.step_bytes(15) == plain.step_bytes(15) + 2 * copy
        prefill = replace(plain, tokens=2048)
        assert replace(copied, tokens=2048).step_bytes(0) == prefill.step_bytes(0) + copy


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_cycle_ends_with_its_only_fold(kind, tokens):
    cycle = case(kind, tokens).cycle()
    assert len(cycle) == 16 // tokens
    assert [case(kind, tokens).folds(h) for h in cycle] == [False] * (len(cycle) - 1) + [True]


# ---- subjects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("tokens", [1, 4, 8, 40])
def test_ours_agrees_with_the_reference(kind, tokens, monkeypatch):
    """Through the benchmark's own cursors, over two cycles, with tokens rejected."""
    monkeypatch.setattr(problem, "ACTIVATION", torch.float32)
    monkeypatch.setattr(ours, "ACTIVATION", torch.float32)
    assert measure.checked(case(kind, tokens), ours.Replay) < 1e-5
    if tokens == 1:
        assert measure.checked(case(kind, tokens), ours.Standard) < 1e-5
    else:
        with pytest.raises(Unsuited):
            measure.checked(case(kind, tokens), ours.Standard)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_reads_of_copies_are_held_against_a_reference_that_has_one(kind, tokens, monkeypatch):
    monkeypatch.setattr(problem, "ACTIVATION", torch.float32)
    monkeypatch.setattr(ours, "ACTIVATION", torch.float32)
    monkeypatch.setitem(MODELS[kind], "wide", {**SMALL, **WIDE}[kind])
    plain = case(kind, tokens, "wide")
    for subject in (ours.Fp8Reads, ours.Nvfp4Reads):
        # The reference folds in float64, by which a few codes round the other way.
        assert measure.checked(plain, subject) < 2e-4
        exact, copied = measure.expected(plain), measure.expected(subject.held_against(plain))
        rounding = float((copied - exact).norm() / exact.norm())
        assert 1e-3 < rounding < 0.1 if tokens < 40 else rounding == 0


def test_cursors_of_a_fold_are_those_of_advance():
    subject = ours.Replay([problem.Problem.random(case(tokens=4))])
    subject.place([16, 4])
    committed, folded, fold_to = subject.step_info[:, 1:4].unbind(1)
    assert (committed - folded).tolist() == [16, 4] and (fold_to - folded).tolist() == [16, 0]
    subject.place([16])
    subject.commit(3)
    assert subject.histories == [3] and subject.folded == 1016


class Wrong(ours.Replay):
    def step(self, layer, i):
        return super().step(layer, i) * 1.1


def test_wrong_outputs_are_not_timed():
    with pytest.raises(Unavailable, match="its outputs are wrong"):
        measure.checked(case(), Wrong)


class Choosy(ours.Replay):
    rows: set[int] = set()

    def __init__(self, problems):
        super().__init__(problems)
        self.rows.add(self.case.batch)

    @classmethod
    def checked_rows(cls, case):
        return min(case.batch, 5)


def test_a_subject_says_how_many_rows_its_check_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 1}))
    for batch in (1, 4, 300):
        assert all(r.error < 1e-2 for r in measure.measure(case(batch=batch), {"choosy": Choosy}, None, 1.0))
    assert Choosy.rows == {1, 4, 5}


class Broken(Subject):
    def __init__(self, problems):
        raise RuntimeError("no such kernel\nand more")

    step = bytes = None


def test_what_cannot_be_measured_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 1}))
    Broken.__abstractmethods__ = frozenset()
    subjects = {"ours": ours.Replay, "wrong": Wrong, "broken": Broken, "unsuited": ours.Standard}
    results = {r.subject: r for r in measure.measure(case(tokens=4), subjects, None, 1.0)}
    assert set(results) == {"ours", "wrong", "broken"}
    assert results["ours"].unavailable is None and results["ours"].error < 1e-2
    assert results["broken"].unavailable == "RuntimeError: no such kernel"
    text = report.tables(list(results.values()))
    assert "broken: mamba2, T = 4, float32 | RuntimeError: no such kernel" in text
    assert "TensorRT-LLM" in text


# ---- results ---------------------------------------------------------------------------------------------------------


def some_run() -> report.Run:
    results = []
    for batch, us in ((1, 5.0), (64, 50.0)):
        shared = {"kind": "mamba2", "model": "nemotron-3-nano", "state": "float32", "batch": batch, "tokens": 1}
        one = measure.Result(
            **shared, subject=report.OURS, us=us, by_history={0: us, 15: 2 * us}, mixed_us=us, bytes=1e6
        )
        one.gb_s, one.of_floor = one.bytes / us * 1e-3, 0.5
        results += [one, measure.Result(**shared, subject="vllm", us=2 * us, by_history={0: 2 * us}, bytes=2e6)]
    return report.Run({"gpu": "none"}, 4.0, results)


def test_reads_of_copies_are_compared_with_the_fastest_standard_kernel():
    def result(subject: str, us: float, **fields) -> measure.Result:
        shared = {
            "kind": "mamba2",
            "model": "nano",
            "state": "float32",
            "batch": 64,
            "tokens": 1,
            "by_history": {0: us},
        }
        return measure.Result(**{**shared, "subject": subject, "us": us, **fields})

    cycled = {"by_history": {0: 10.0, 15: 60.0}}
    standards = [result("fla", 90.0), result("sglang", 80.0)]
    others = [result("a replay", 50.0, **cycled), result("narrow", 40.0, state="bfloat16")]
    reads = [result(name, us, **cycled) for name, us in zip(report.READS.values(), (32.0, 20.0), strict=True)]
    text = report.tables([result(report.OURS, 40.0, **cycled), *standards, *others, *reads])
    assert "| nano | 64 | sglang | 80.0 | 40.0 (2.00) | 32.0 (2.50) | 20.0 (4.00) |" in text
    assert not list(report.copy_reads(standards))


def test_results_survive_a_file(tmp_path):
    run = some_run()
    run.write(tmp_path / "new" / "results.json")
    assert report.Run.read(tmp_path / "new" / "results.json") == run
    assert json.loads((tmp_path / "new" / "results.json").read_text())["schema_version"] == report.SCHEMA_VERSION


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "is no result of a benchmark"),
        ("{}", "has another schema_version"),
        ("[]", "has another schema_version"),
        ('{"schema_version": 0}', "has another schema_version"),
    ],
)
def test_other_files_are_refused(tmp_path, content, match):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError, match=match):
        report.Run.read(path)


def test_table_shows_times_and_multiples_of_ours():
    text = report.tables(some_run().results)
    assert "| batch | us | GB/s | of floor | fold | mixed | vllm |" in text
    assert "| 64 | 50.0 | 20 | 50% | 100.0 | 50.0 | 100.0 (2.00) |" in text


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plots import plot

    (path,) = plot(some_run(), tmp_path)
    assert path.name == "mamba2-nemotron-3-nano.png" and path.read_bytes().startswith(b"\x89PNG")


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mamba2"], "needs a CUDA GPU"),
        (["conv"], "needs a CUDA GPU"),
        (["fetch", "--only", "nobody"], "no peer 'nobody'"),
        (["plot", "nowhere.json"], "no result of a benchmark"),
        (["prebuild", "--peers", "nowhere"], "no folder nowhere|is needed to compile"),
        (["prebuild", "--peers", str(Path(__file__).parent)], "cannot be imported|is needed to compile"),
    ],
)
def test_commands_say_what_is_wrong(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    assert command.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    assert any(part in error for part in message.split("|"))


def test_all_means_every_kind_and_only_whole_models():
    options = command.parse(["all", "--batch", "1", "--verify_batch", "2", "--tokens", "1", "4", "--state", "float32"])
    found = {(c.kind, c.model, c.tokens, c.batch) for c in command.cases(options)}
    assert {kind for kind, *_ in found} == {"mamba2", "gated_delta", "kda"}
    assert ("mamba2", "nemotron-3-super", 1, 1) in found and ("kda", "kimi-linear", 4, 2) in found
    assert ("gated_delta", "qwen3.5-35b", 2048, 8) in found and not any("tp8" in model for _, model, *_ in found)
