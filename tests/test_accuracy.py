"""The accuracy report: formats by their definitions, and variants against transformers and against one another."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from division import DivisionOfGpus
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Behind everything else: the package is to be found where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import accuracy, accuracy_runs, accuracy_summary, accuracy_variants, read_copy_error
from benchmarks.accuracy_formats import FORMATS, e4m3
from benchmarks.accuracy_report import EMULATED, Result
from benchmarks.accuracy_runs import GraphRun, Run, feed_all, prepared
from benchmarks.accuracy_variants import BASELINE, Variant, single_copy, suits, variants, written
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.demo.models import make_checkpoint
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.reference.read_copy import dequantise, quantise
from trtllm_replayssm.replay import QUANTISED_STATES, ReplayConfig
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.graphs import Forward, StepShape
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.steps import PackedSteps
from trtllm_replayssm.runtime.tokenizer import Tokenizer

FAMILIES = ("nemotron_h", "qwen3_next", "kimi_linear")
ROWS, LENGTH = 2, 37


# ---- formats ---------------------------------------------------------------------------------------------------------


def nearest(x: float, values: list[float]) -> float:
    """The nearest of all values by rising magnitude; of two as near the one at an even place, whose last bit is 0."""
    size = min(abs(x), values[-1])
    place = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
    return math.copysign(values[place], x)


def test_numbers_round_to_the_nearest_value_of_e4m3() -> None:
    normal = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]
    values = [m / 8 * 2.0**-6 for m in range(8)] + normal[:-1]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    points = [p for middle in middles for p in (middle, middle * (1 + 1e-6), middle * (1 - 1e-6))]
    points += [*values, 2 * values[-1], 1e30, 0.3, 2.9]
    points += [-p for p in points]
    assert e4m3(torch.tensor(points)).tolist() == [nearest(p, values) for p in torch.tensor(points).tolist()]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_keep_their_scales_and_lose_little(name: str) -> None:
    state = torch.randn(3, 2, 8, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 8)[:, None]
    state[0, 0, 0] = 0
    kept = FORMATS[name](state)
    assert torch.isfinite(kept).all() and (kept[0, 0, 0] == 0).all()
    rows = (kept - state).norm(dim=-1) / state.norm(dim=-1).clamp(min=1e-30)
    # NVFP4 has one float32 scale a head, so that small rows fall out of its range; the largest rows tell its error.
    assert rows[..., -1].max() < {"fp8": 0.04, "int8": 0.02, "nvfp4": 0.15}[name]
    assert rows[..., -1].min() > {"fp8": 0.01, "int8": 0.002, "nvfp4": 0.05}[name]
    again = FORMATS[name](kept)
    assert (again - kept).norm() < 1e-5 * kept.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_formats_have_the_same_values_on_a_gpu(name: str) -> None:
    state = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    with DivisionOfGpus():
        kept = FORMATS[name](state)
    assert torch.equal(kept, FORMATS[name](state))


def test_nvfp4_has_the_values_of_a_read_copy() -> None:
    """Ties, signs and zeros included, though it is computed in other ways."""
    random = torch.Generator().manual_seed(1)
    state = torch.randn(2, 3, 16, 64, generator=random) * torch.logspace(-4, 3, 16)[:, None]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0])
    state[0, 0, 0], state[1, 1] = ties.repeat(4), 0
    state[1, 2] = ties.repeat(4) * torch.exp2(torch.arange(16.0))[:, None]
    assert torch.equal(FORMATS["nvfp4"](state), dequantise(quantise(state, "nvfp4")))


class Seen(TorchDispatchMode):
    """Names of the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_emulation_never_waits_for_the_device(name: str) -> None:
    """A step with it is a CUDA graph: nothing may come from the host or go there."""
    state, step = torch.randn(2, 2, 8, 32), torch.zeros(2, STEP_WORDS, dtype=torch.int32)
    step[:, Step.FOLD_TO] = 1
    layer = single_copy(FORMATS[name])(lambda step, pools: pools["state"].sum())
    with Seen() as seen:
        layer(step, {"state": state})
    assert "abs" in seen.names and not seen.names & {"_local_scalar_dense", "nonzero", "lift_fresh", "item", "index"}


# ---- variants --------------------------------------------------------------------------------------------------------


class Made:
    """A tiny model with random weights, its engine in float32, and tokens to feed."""

    def __init__(self, family: str, folder: Path) -> None:
        self.checkpoint = folder / family
        self.model = make_checkpoint(family, folder / "hf")
        convert(folder / "hf", self.checkpoint, dtype="float32")
        build_engine(self.checkpoint, folder / "engine", BuildOptions(ROWS, 64, replay_window=1))
        self.engine = Engine.load(folder / "engine", device="cpu")
        random = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, 259, (ROWS, LENGTH), generator=random, dtype=torch.int32)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """For what is the same whatever the model."""
    return Made("nemotron_h", tmp_path_factory.mktemp("one"))


def measured(comparison: accuracy.Comparison, variant: Variant) -> Result:
    result = comparison.results([variant])[variant]
    assert isinstance(result, Result)
    return result


def test_variants_differ_as_their_precision_says(made: Made) -> None:
    comparison = accuracy.Comparison(made.engine, made.tokens, 1.0)
    results = {v.name: measured(comparison, v) for v in variants(made.engine.config.checkpoint, [4, 16])}
    base = results[BASELINE]
    with torch.no_grad():
        logits = made.model(input_ids=made.tokens.long(), use_cache=False).logits.float()
    true = logits.log_softmax(-1)[:, :-1].gather(-1, made.tokens[:, 1:, None].long())
    assert base.bits_per_byte == pytest.approx(-true.mean().item() / math.log(2), abs=1e-4)
    assert base.agreement == 1 and set(base.drift) == {0.0} and len(base.drift) == accuracy.SEGMENTS

    def drift(name: str) -> float:
        return sum(results[name].drift) / accuracy.SEGMENTS

    for window in (4, 16):
        assert drift(f"float32, window {window}") < 1e-4 and results[f"float32, window {window}"].agreement > 0.97
        assert drift(f"bfloat16, window {window}") > drift(f"float16, window {window}") > 1e-6
        assert results[f"float32, window {window}"].rewrites == ROWS * ((LENGTH - 1) // window)
    assert base.rewrites == ROWS * (LENGTH - 1)
    for dtype in ("bfloat16", "float16"):
        assert drift(f"{dtype}, standard") > drift(f"{dtype}, window 16")
    mamba2 = made.checkpoint.name == "nemotron_h"
    for window in ("standard", "window 16"):
        assert drift(f"nvfp4 single copy, {window}") > drift(f"fp8 single copy, {window}") > drift(f"float16, {window}")
        assert drift(f"int8 single copy, {window}") > 1e-5
        assert results[f"int8 single copy, {window}"].emulated != mamba2
        assert results[f"nvfp4 single copy, {window}"].emulated
        assert (f"float16, {window}, rounded at random" in results) == mamba2
    reads = {name for name in results if "read copy" in name}
    for read_dtype in ("fp8", "nvfp4"):
        fits = suits(made.engine.config.checkpoint, ReplayConfig(window=16, state_read_dtype=read_dtype))
        assert (f"{read_dtype} read copy, window 16" in reads) == fits
    assert all(drift(name) > 1e-5 and not results[name].emulated for name in reads)
    assert "nvfp4 read copy, window 16" in reads
    derived = [name for name in results if "derived" in name]
    assert len(derived) == (0 if mamba2 else 3)
    if derived:
        exact, half, brain = (
            f"float32, window 16, derived fold of {d} updates" for d in ("float32", "float16", "bfloat16")
        )
        assert drift(brain) > drift(half) > drift(exact) and drift(exact) < 1e-4


def first_state(made: Made, variant: Variant) -> tuple[Tensor, Tensor]:
    """The first recurrent layer's pool after all tokens, and the last logits."""
    session = Session(variant.engine(made.engine, ROWS))
    run = prepared(session, made.tokens, None)
    feed_all([run])
    name = next(name for name in session.pools if name.endswith(".state"))
    return session.pools[name], run.found().bits


def test_a_read_copy_never_enters_the_checkpoint(made: Made) -> None:
    usual = ReplayConfig(window=16)
    state, bits = first_state(made, Variant("plain", usual))
    read_state, read_bits = first_state(made, Variant("read", replace(usual, state_read_dtype="nvfp4")))
    assert torch.equal(state, read_state) and not torch.equal(bits, read_bits)


def test_a_single_copy_is_all_that_is_left(made: Made) -> None:
    state, _ = first_state(made, Variant("single", ReplayConfig(window=16), single_copy(FORMATS["int8"])))
    steps = state / state.abs().amax(-1, keepdim=True) * 127
    assert (steps - steps.round()).abs().max() < 1e-3
    assert len(steps.round().unique()) > 100


@pytest.mark.parametrize("name", QUANTISED_STATES)
def test_emulated_single_copies_are_the_engines(made: Made, name: str) -> None:
    """Bit by bit, where the reference is forced to keep such a state."""
    usual = ReplayConfig(window=8)
    real = replace(usual, state_dtype=name, force_quantised_state=True)
    _, bits = first_state(made, Variant("engine", real))
    _, emulated = first_state(made, Variant("emulated", usual, single_copy(FORMATS[name])))
    _, exact = first_state(made, Variant("exact", usual))
    assert torch.equal(bits, emulated) and not torch.equal(bits, exact)


def test_only_slots_that_fold_are_rewritten() -> None:
    """Rows of slots 2, none (padding, whatever it says) and 0; of them only slot 2 folds."""
    step = torch.zeros(3, STEP_WORDS, dtype=torch.int32)
    step[:, Step.SLOT] = torch.tensor([2, -1, 0])
    step[:, Step.FOLDED] = torch.tensor([5, 0, 7])
    step[:, Step.FOLD_TO] = torch.tensor([9, 4, 7])
    marks = written(step, torch.empty(4, 2, 3, 3))
    assert marks.shape == (4, 1, 1, 1) and marks.flatten().tolist() == [False, False, True, False]


class Stepwise:
    """Stands for CUDA graphs, and for their stream: what would be captured is computed at each replay."""

    def __init__(self, *_: Any) -> None:
        self.captured: dict[StepShape, Any] = {}

    def get(self, shape: StepShape, forward: Forward) -> Any:
        if shape not in self.captured:
            inputs = torch.zeros(shape.input_size, dtype=torch.int32)
            _, slots, lengths, _ = shape.inputs(inputs)
            slots.fill_(-1), lengths.fill_(1)
            forward(shape, inputs)
            graph = SimpleNamespace(replay=partial(forward, shape, inputs))
            self.captured[shape] = SimpleNamespace(inputs=inputs, graph=graph)
        return self.captured[shape]

    def wait_stream(self, stream: Any) -> None:
        assert stream is None

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("window", [1, 16])
def test_tokens_that_never_leave_the_device(made: Made, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU captures, a token from text to score, against a session's steps and commits; tests/gpu has the graphs."""
    monkeypatch.setattr(accuracy_runs, "StepGraphs", Stepwise)
    monkeypatch.setattr(accuracy_runs, "SCORED", 8)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    engine = Variant("any", ReplayConfig(window=window)).engine(made.engine, ROWS)
    plain, captured = Session(engine), Session(engine)
    steps = PackedSteps(engine, captured.cursors, captured.pools, captured.staging, False)
    stream: Any = Stepwise()
    runs = [Run(plain, made.tokens), GraphRun(captured, made.tokens, steps, stream)]
    feed_all(runs)
    wanted, found = (run.found() for run in runs)
    # A graph sees more of the KV cache than a step of a CPU, and sums in another order.
    torch.testing.assert_close(found.bits, wanted.bits, rtol=0, atol=1e-5)
    assert torch.equal(wanted.best, found.best)
    assert wanted.rewrites == found.rewrites == ROWS * ((LENGTH - 1) // window)
    assert torch.equal(plain.host, captured.cursors)


def test_errors_of_read_copies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies cost outputs what their format says, and the state nothing."""
    monkeypatch.setattr(sys, "argv", ["read_copy_error", "--tokens", "96", "--step", "4"])
    read_copy_error.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [kind for kind in ("mamba2", "gated_delta", "kda") for _ in range(3)]
    for same, fp8, nvfp4 in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        last = [float(row[3]) for row in (same, fp8, nvfp4)]
        assert last[0] < 1e-5 < 1e-3 < last[1] < 4e-2
        assert last[1] < last[2] < 0.15
        assert same[4] == fp8[4] == nvfp4[4]


# ---- the command -----------------------------------------------------------------------------------------------------


def command(one: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 4)
    arguments = ["--checkpoint_dir", str(one.checkpoint), "--text", str(text), "--output", str(tmp_path / "out")]
    sizes = ["--device", "cpu", "--rows", "2", "--context_len", "20", "--windows", "4"]
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments, *sizes, *more])
    return accuracy.main()


def test_report(one: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    assert command(one, tmp_path, monkeypatch, "--windows", "16", "4", "--only", "bfloat16", "read", "int8") == 0
    name, folder = one.checkpoint.name, tmp_path / "out"
    report = json.loads((folder / f"{name}.json").read_text())
    names = [result["name"] for result in report["results"]]
    assert (
        names[0] == BASELINE
        and len(names) > 3
        and all(any(w in n for w in ("bfloat16", "read", "int8")) for n in names[1:])
    )
    words = ["bfloat16", "read", "int8"]
    places = [next(i for i, word in enumerate(words) if word in n) for n in names[1:]]
    assert places == sorted(places) and set(places) == {0, 1, 2}
    assert report["about"]["bytes_per_token"] == 1.0 and report["segments"][-1] == 19
    text = (folder / f"{name}.md").read_text()
    assert len([line for line in text.splitlines() if line.startswith("|")]) == len(names) + 2
    # Mamba-2 layers have int8 states of their own.
    assert "(emulated)" not in text and EMULATED not in text
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder / f"{name}.png") in capsys.readouterr().out

    (folder / "other.json").write_text(json.dumps(report | {"model": "other"}))
    monkeypatch.setattr(sys, "argv", ["accuracy_summary", str(folder / f"{name}.json"), str(folder / "other.json")])
    assert accuracy_summary.main() == 0
    first, second = (block.splitlines() for block in capsys.readouterr().out.split("\n\n") if block.startswith("|"))
    rows, windows = ([line.strip("| ").split(" | ") for line in lines] for lines in (first, second))
    assert [row[0] for row in rows[2:]] == [n for n in names if "window 4" not in n] and {len(row) for row in rows} == {
        3
    }
    assert rows[2][1] == f"{report['results'][0]['bits_per_byte']:.5f} bits a byte"
    results = {result["name"]: result for result in report["results"]}
    assert rows[3][1].endswith(f"{results[rows[3][0]]['drift'][-1]:.1e}")
    assert windows[0] == ["model", "state", "window 1", "window 4", "window 16"]
    bfloat16 = [results[f"bfloat16, {window}"]["drift"][-1] for window in ("standard", "window 4", "window 16")]
    row = next(row for row in windows if row[1] == "bfloat16")
    assert all(found.endswith(f", {drift:.1e}") for found, drift in zip(row[2:], bfloat16, strict=True))

    monkeypatch.setattr(sys, "argv", ["accuracy_summary", str(folder / f"{name}.md")])
    assert accuracy_summary.main() == 1
    assert "is no report" in capsys.readouterr().err


def test_parts_of_a_report_are_joined(
    one: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    name, paths = f"{one.checkpoint.name}.json", [tmp_path / "first.json", tmp_path / "second.json"]
    for path, word in zip(paths, ("nvfp4", "int8 single")):
        assert command(one, tmp_path, monkeypatch, "--only", word) == 0
        (tmp_path / "out" / name).rename(path)
    second = json.loads(paths[1].read_text())
    second["failed"] = {"nvfp4 read copy, window 16": "ran in the first part", "float16, standard": "out of registers"}
    paths[1].write_text(json.dumps(second))
    alone = [[result["name"] for result in json.loads(path.read_text())["results"]] for path in paths]
    monkeypatch.setattr(sys, "argv", ["accuracy_summary", *map(str, paths), "--output", str(tmp_path / "joined")])
    assert accuracy_summary.main() == 0
    whole = json.loads((tmp_path / "joined" / name).read_text())
    results = whole["results"]
    assert whole["failed"] == {"float16, standard": "out of registers"}
    assert [result["name"] for result in results] == [*alone[0], *alone[1][1:]]
    assert (tmp_path / "joined" / name).with_suffix(".png").exists()
    other = json.loads(paths[1].read_text())
    other["about"]["rows"] = 3
    paths[1].write_text(json.dumps(other))
    assert accuracy_summary.main() == 1
    assert f"two reports of {one.checkpoint.name} do not compare" in capsys.readouterr().err


def test_time_ends_a_run_with_what_there_is(one: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    times = iter([0.0, 0.0, 1.0, 8.0, 9.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(accuracy.time, "perf_counter", lambda: next(times, 9.0))
    assert command(one, tmp_path, monkeypatch, "--only", "nvfp4 single", "--seconds", "10") == 0
    report = json.loads((tmp_path / "out" / f"{one.checkpoint.name}.json").read_text())
    assert [result["name"] for result in report["results"]] == [BASELINE]
    assert report["left_out"] == ["nvfp4 single copy, window 16", "nvfp4 single copy, standard"]
    assert "for want of time: nvfp4 single" in (tmp_path / "out" / f"{one.checkpoint.name}.md").read_text()


def test_a_variant_that_fails_is_named_and_the_rest_goes_on(
    one: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def failing(state: Tensor) -> Tensor:
        raise RuntimeError("out of registers\nand more")

    def listed(checkpoint: CheckpointConfig, windows: Any) -> Any:
        for v in variants(checkpoint, windows):
            yield replace(v, emulated=single_copy(failing)) if v.name == "nvfp4 single copy, window 16" else v

    monkeypatch.setattr(accuracy_variants, "variants", listed)
    assert command(one, tmp_path, monkeypatch, "--only", "nvfp4 single") == 1
    assert capsys.readouterr().err.endswith("error: 1 of 3 variants failed: nvfp4 single copy, window 16\n")
    report = json.loads((tmp_path / "out" / f"{one.checkpoint.name}.json").read_text())
    assert [found["name"] for found in report["results"]] == [BASELINE, "nvfp4 single copy, standard"]
    text = (tmp_path / "out" / f"{one.checkpoint.name}.md").read_text()
    assert "* nvfp4 single copy, window 16: out of registers\n" in text and EMULATED in text


def test_bits_are_over_bytes(one: Made) -> None:
    tokens, size = accuracy.pieces(Tokenizer(one.checkpoint), "ab\u20ac" * 4, 2, 10)
    assert size == 1.0 and tokens.shape == (2, 10)
    whole, half = (
        measured(accuracy.Comparison(one.engine, one.tokens[:, :6], size), Variant(BASELINE, ReplayConfig(window=1)))
        for size in (1.0, 2.0)
    )
    assert half.bits_per_byte == pytest.approx(whole.bits_per_byte / 2)
    with pytest.raises(UserError, match="the text has 5 tokens"):
        accuracy.pieces(Tokenizer(one.checkpoint), "short", 2, 10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--context_len", "1"], "context_len is 1"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read: No such file or directory\n"),
        (["--text", sys.executable], "is not UTF-8: byte "),
        (
            ["--only", "float32", "foo"],
            "error: no variant has 'foo' in its name\nhint: the names are nvfp4 read copy, window 16; ",
        ),
        (["--context_len", "4000"], "fewer than 2 pieces of 4000"),
        (["--checkpoint_dir", "nowhere"], "nowhere/config.json does not exist\nhint: --checkpoint_dir must be"),
        (["--windows", "65"], "replay_window is 65"),
    ],
)
def test_wrong_input_is_one_sentence(
    one: Made, more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(one, tmp_path, monkeypatch, *more) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error
