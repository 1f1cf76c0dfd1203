"""``tune``: cursors of a timed layer, errors against float64, the choice, and the file that ``build`` reads.

Kernels are the reference's and times are made up; what a GPU measures is the same code over the CUDA kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import LAYERS, REAL_HEADS, decoder, write_checkpoint

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.cli import tune as command
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.implementation import reference
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.synthetic import synthetic_checkpoint
from trtllm_replayssm.tuning.candidate import WINDOWS, Candidate, SlotBytes, candidates
from trtllm_replayssm.tuning.choice import chosen, explained, is_sound, limits, pareto
from trtllm_replayssm.tuning.drift import WEAK_DECAY, Drift, Request, weak_weights
from trtllm_replayssm.tuning.layer import Dtypes, cycle, log_decays, signature, step_info
from trtllm_replayssm.tuning.measure import Row, Setting, Times, Tuner, rows, spread
from trtllm_replayssm.tuning.subject import TunedSubject, engine_subject
from trtllm_replayssm.tuning.tuned import shapes

CPU = torch.device("cpu")
SHAPES: dict[str, Any] = {
    "mamba2": Mamba2Attributes(4, 16, 32, 2, 16, 16),
    "gated_delta": GatedDeltaAttributes(2, 4, 32, 16, 16, 16),
    "kda": KdaAttributes(2, 32, 16, 16, 16),
    "kda_bounded": KdaAttributes(2, 32, 16, 16, 16, lower_bound=-5.0),
}
CONFIG = Path(__file__).parent / "data" / "configs" / "nemotron_3_nano_30b_a3b.json"


class FakeTimer:
    """Runs what it is given, and says that every launch took as long as its checkpoint has bytes, in thousands."""

    def captured(self, launches: Sequence[Callable[[], object]]) -> Callable[[], float]:
        def run() -> float:
            for launch in launches:
                launch()
            return launches[0].pools["state"].nbytes / 1e3  # type: ignore[attr-defined]

        return run


def subject(layers=REAL_HEADS, **changes: Any) -> TunedSubject:
    return TunedSubject(CheckpointConfig("TestForCausalLM", "bfloat16", 1, decoder(layers), ReplayConfig(), **changes))


def row(window=16, us=1.0, size=100, error=1e-3, state="float32") -> Row:
    return Row(Candidate(window, state, "same"), SlotBytes(size, 0, 0), Times(us, us, us), Drift(error, error, error))


# ---- cursors and inputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_the_last_step_of_a_cycle_folds_and_no_other(window: int, tokens: int) -> None:
    histories = cycle(window, tokens)
    step = step_info(window, histories, tokens, len(histories))
    assert (step[:, Step.FOLD_TO] > step[:, Step.FOLDED]).tolist() == [False] * (len(histories) - 1) + [True]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_plans_of_a_request_follow_each_other(window: int, tokens: int) -> None:
    """They are what advance makes of them one by one: each finds what the one before has left."""
    request = Request(SHAPES["mamba2"], weak_weights(SHAPES["mamba2"]), torch.float32, 200, tokens, 1, CPU)
    plans = request.plans(window)
    assert plans[:, Step.COMMITTED].tolist() == list(range(0, request.tokens, tokens))
    assert plans[0, Step.FOLDED] == 0 and plans[-1, Step.FOLD_TO] == request.tokens
    assert torch.equal(plans[1:, Step.FOLDED], plans[:-1, Step.FOLD_TO])
    assert (plans[:, Step.COMMITTED] - plans[:, Step.FOLDED]).max() == (
        window if tokens > 1 else window - 1
    ) // tokens * tokens


@pytest.mark.parametrize("name", SHAPES)
def test_weak_weights_forget_as_slowly_as_said(name: str) -> None:
    weights = weak_weights(SHAPES[name])
    assert tuple(map(len, weights)) == signature(SHAPES[name]).weights
    torch.testing.assert_close(log_decays(SHAPES[name], *weights[:2]).unique(), torch.tensor([WEAK_DECAY]))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_errors_are_those_of_rounding(name: str) -> None:
    """float32 has nearly none; a 16-bit state loses at each fold, a read copy for the outputs alone."""
    drifts = {}
    for state, read, window in (
        (torch.float32, "same", 4),
        (torch.float32, "same", 16),
        (torch.float32, "fp8", 16),
        (torch.float32, "nvfp4", 16),
        (torch.bfloat16, "same", 4),
        (torch.bfloat16, "same", 32),
    ):
        attributes = replace(SHAPES[name], window=window, ring_rows=window + 4, read_dtype=read)
        request = Request(attributes, weak_weights(attributes), torch.float32, 512, 4, 2, CPU)
        dtypes = Dtypes(torch.float32, state, torch.float32)
        drifts[state, read, window] = request.drift(attributes, dtypes, reference())
    exact = drifts[torch.float32, "same", 16]
    for window in (4, 16):
        assert max(vars(drifts[torch.float32, "same", window]).values()) < 1e-5
    fp8, nvfp4 = drifts[torch.float32, "fp8", 16], drifts[torch.float32, "nvfp4", 16]
    assert fp8.state == nvfp4.state == exact.state
    assert 5e-3 < fp8.last < 3e-2 < nvfp4.last < 0.2
    often, seldom = drifts[torch.bfloat16, "same", 4], drifts[torch.bfloat16, "same", 32]
    assert 1e-3 < seldom.last < often.last and seldom.state < often.state


def test_padding_rows_change_nothing() -> None:
    attributes = replace(SHAPES["gated_delta"], ring_rows=20)
    dtypes = Dtypes(torch.float32, torch.bfloat16, torch.float32)
    alone, padded = (
        Request(attributes, weak_weights(attributes), torch.float32, 64, 4, batch, CPU) for batch in (1, 5)
    )
    # The generator draws more tokens for more rows; the first are those of the smaller batch only if they are copied.
    padded.inputs = [torch.cat([x[: alone.tokens], y[alone.tokens :]]) for x, y in zip(alone.inputs, padded.inputs)]
    padded.outputs, padded.state = alone.outputs, alone.state
    wanted, found = (vars(r.drift(attributes, dtypes, reference())) for r in (alone, padded))
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-7)


def test_decays_are_those_of_the_layer_that_forgets_the_slowest(tmp_path: Path) -> None:
    kda = Kda(num_heads=4, head_dim=16, conv_kernel=4, norm_epsilon=1e-6, lower_bound=-5.0)
    write_checkpoint(tmp_path / "checkpoint", decoder((kda, Mlp(96, "swiglu"), kda, kda)))
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    found, config = engine_subject(tmp_path / "engine")
    (group,) = found.groups()
    assert group.count == 3 and config.max_batch_size == 8
    own = found.own_weights(group)
    assert own is not None
    attributes = kda.attributes(ReplayConfig())
    assert isinstance(attributes, KdaAttributes)
    every = []
    for name in group.names:
        (one,) = [replace(group, names=(name,))]
        weights = found.own_weights(one)
        assert weights is not None
        every.append(float(log_decays(attributes, *weights[:2]).median()))
    assert len(set(every)) == 3 and float(log_decays(attributes, *own[:2]).median()) == max(every)


# ---- candidates ------------------------------------------------------------------------------------------------------


def test_candidates_that_cannot_be_are_listed_with_their_reason() -> None:
    """A window shorter than a step, and states too narrow for a copy's blocks."""
    setting = Setting(batch=2, draft_len=7, error_tokens=64)
    listed = list(candidates((4, 8), ("float32", "float32"), ("same", "nvfp4")))
    assert len(listed) == 4
    found = {(r.candidate.window, r.candidate.read_dtype): r.refused for r in rows(subject(), setting, iter(listed))}
    assert found[8, "same"] is None and "shorter than a verify step" in str(found[4, "same"])
    narrow = rows(subject((Kda(2, 24, 4, 1e-6),)), replace(setting, draft_len=0), iter(listed))
    assert [r.refused is None for r in narrow] == [True, True, False, False]
    assert "multiple of 16" in str(narrow[2].refused)


def test_a_candidate_without_a_kernel_is_refused() -> None:
    """By what its first launch says; the others are measured."""

    def kda(attributes: Any, *arguments: Any) -> torch.Tensor:
        if attributes.read_dtype != "same":
            raise EngineError("no such kernel")
        return reference().kda(attributes, *arguments)

    setting, model = Setting(2, 0, 16), subject((Kda(2, 32, 4, 1e-6),))
    tuner = Tuner(model, setting, FakeTimer(), replace(reference(), kda=kda), CPU)
    found = rows(model, setting, candidates((8,), ("float32",), ("same", "fp8")))
    measured = command.measure_all(tuner, found)
    assert measured[0].times is not None and measured[1] == Row(found[1].candidate, refused="no such kernel")


def test_bytes_are_those_of_the_layers_pools() -> None:
    """Nemotron 3 Nano: 23 layers of 2 MiB in float32; MXFP8 has a byte an element and one for 32."""
    nano = TunedSubject(synthetic_checkpoint(CONFIG))
    listed = candidates((16,), ("float32", "bfloat16"), ("same", "fp8"))
    sizes = [r.bytes for r in rows(nano, Setting(256, 0, 64), listed)]
    assert [size.checkpoint for size in sizes if size] == [23 * 2**21, 23 * 2**21, 23 * 2**20, 23 * 2**20]
    assert [size.copy for size in sizes if size] == [0, 23 * 2**19 * 33 // 32] * 2
    assert all(size is not None and size.ring == 23 * 16 * ((64 * 64 + 8 * 128) * 2 + 64 * 4) for size in sizes)


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", [0, 3])
def test_every_layer_is_measured(draft_len: int) -> None:
    setting = Setting(batch=2, draft_len=draft_len, error_tokens=32)
    model = subject((*LAYERS[:3], LAYERS[0]))
    tuner = Tuner(model, setting, FakeTimer(), reference(), CPU)
    (found,) = rows(model, setting, candidates((8,), ("bfloat16",), ("same",)))
    assert tuner.compiled([found], jobs=2) == [found]
    measured = tuner.measured(found)
    # Two Mamba-2 layers of [8, 16, 16] and one delta-rule layer of [4, 16, 16], two requests, two bytes an element.
    assert measured.times is not None and measured.times.mean == pytest.approx((2 * 8 + 4) * 256 * 2 * 2 / 1e3)
    assert measured.drift is not None and 1e-4 < measured.drift.last < 5e-2


def test_quantised_states_are_candidates_on_demand() -> None:
    setting = Setting(batch=2, draft_len=0, error_tokens=64)
    model = subject(LAYERS[:1])
    tuner = Tuner(model, setting, FakeTimer(), reference(), CPU)
    found = rows(model, setting, candidates((8,), ("int8",), ("same", "fp8")))
    measured = tuner.measured(found[0])
    assert measured.bytes is not None and measured.bytes.checkpoint == 8 * 16 * 16 + 8 * 16 * 4
    assert measured.drift is not None and 1e-3 < measured.drift.state < 5e-2
    assert "does not go with state_read_dtype" in str(found[1].refused)
    assert "feeds its rounding back" in str(rows(subject(LAYERS[:3]), setting, iter([found[0].candidate]))[0].refused)


def test_a_layer_without_numbers_is_not_hidden_by_the_others() -> None:
    """The first of two kinds of layers answers NaN: the candidate cannot be chosen."""

    def mamba2(*arguments: Any) -> torch.Tensor:
        return reference().mamba2(*arguments) * float("nan")

    setting, model = Setting(2, 0, 16), subject(LAYERS[:3])
    for broken in ({"mamba2": mamba2}, {"gated_delta": lambda *a: reference().gated_delta(*a) * float("nan")}):
        tuner = Tuner(model, setting, FakeTimer(), replace(reference(), **broken), CPU)
        (found,) = rows(model, setting, candidates((8,), ("float32",), ("same",)))
        measured = tuner.measured(found)
        assert measured.drift is not None and not is_sound(measured), broken


def test_long_cycles_are_timed_at_even_distances() -> None:
    assert spread([]) == [] and spread(range(15)) == range(15) and spread(range(16)) == range(16)
    assert spread(range(63)) == range(0, 63, 4)


def test_a_mean_counts_every_step_once() -> None:
    """Each launch takes as long as its first request has tokens in the ring, and a fold a thousand."""

    class ByHistory(FakeTimer):
        def captured(self, launches: Sequence[Any]) -> Callable[[], float]:
            def run() -> float:
                _, committed, folded, fold_to, *_ = launches[0].info[0].tolist()
                assert all(launch.info is launches[0].info for launch in launches)
                return 1000.0 if fold_to > folded else float(committed - folded)

            return run

    setting = Setting(batch=2, draft_len=0, error_tokens=8)
    tuner = Tuner(subject(LAYERS[:1]), setting, ByHistory(), reference(), CPU)
    for window in (1, 4, 16):
        (found,) = rows(tuner.subject, setting, candidates((window,), ("float32",), ("same",)))
        times = tuner.measured(found).times
        assert times is not None and times.fold == 1000
        assert times.mean == pytest.approx((sum(range(window - 1)) + 1000) / window)


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_pareto_rows_are_beaten_by_nobody_in_everything() -> None:
    measured = [
        row(4, us=3, size=50, error=1e-3),
        row(8, us=2, size=60, error=1e-3),
        row(12, us=2, size=60, error=2e-3),  # as the one before, but less exact
        row(16, us=1, size=70, error=5e-2),
        row(24, us=3, size=80, error=1e-4),
        row(32, us=3, size=50, error=1e-3),  # equal to the first
        row(64, us=0.1, size=1, error=float("nan")),
        Row(Candidate(4, "float32", "fp8"), refused="no kernel"),
    ]
    assert pareto(measured) == {0, 1, 3, 4, 5}


def test_the_fastest_within_the_limits_is_taken() -> None:
    measured = [
        row(4, us=100, size=50, error=1e-3),
        row(8, us=60.0, size=70, error=1.1e-3),
        row(12, us=60.5, size=60, error=1.2e-3),
        row(16, us=10, size=40, error=5e-2),
    ]
    within = limits(measured, None, None)
    assert within.error == pytest.approx(2e-3)
    taken = chosen(measured, within)
    assert taken is measured[2]  # as fast as window 8 within 1 %, and smaller
    text = "\n".join(explained(measured, within, taken, given=False))
    assert (
        "3 of 4 candidates" in text and "chosen: window 12, float32: 60.5 us" in text and "2 times the smallest" in text
    )
    assert "as fast within 1%, but larger or less exact: window 8" in text
    assert "fastest without limits: window 16" in text
    assert chosen(measured, limits(measured, 0.1, None)) is measured[3]
    assert chosen(measured, limits(measured, 2e-3, 55)) is measured[0]


def test_no_candidate_within_the_limits() -> None:
    measured = [row(size=100, error=1e-3), row(size=50, error=1e-2)]
    with pytest.raises(UserError, match=r"smallest error is 1\.0e-03, the fewest bytes of a request are 50"):
        chosen(measured, limits(measured, 5e-3, 60))
    broken = row(error=float("nan"))
    with pytest.raises(UserError, match=r"no candidate can be had: no kernel; its outputs are no numbers$"):
        limits([*[Row(Candidate(4, "float32", "fp8"), refused="no kernel")] * 2, broken], None, None)


# ---- the command, the file, and build --------------------------------------------------------------------------------


def checkpoint(folder: Path, layers=LAYERS[:3]) -> Path:
    write_checkpoint(folder, decoder(layers))
    return folder


def measured_on_a_cpu(args, model, setting, found):
    tuner = Tuner(model, setting, FakeTimer(), reference(), CPU)
    return command.measure_all(tuner, found), {"name": "a CPU"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measured_here", measured_on_a_cpu)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint, and the text of what tune wrote for it."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "measured_here", measured_on_a_cpu)
        assert main(tune_arguments(checkpoint(folder / "checkpoint"), folder / "tuned.json", "--windows", "4")) == 0
    return folder / "checkpoint", (folder / "tuned.json").read_text()


def tune_arguments(folder: Path, output: Path, *more: str) -> list[str]:
    sizes = ["--batch_size", "2", "--error_tokens", "32", "--windows", "4", "8", "--read_dtypes", "same"]
    return ["tune", "--checkpoint_dir", str(folder), *sizes, "--output", str(output), *more]


def test_build_takes_what_tune_chose(tmp_path: Path, on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The made-up times are the smaller the narrower the state, so a 16-bit one is chosen."""
    folder, tuned = checkpoint(tmp_path / "checkpoint"), tmp_path / "tuned.json"
    assert main(tune_arguments(folder, tuned, "--draft_len", "2", "--max_error", "0.5")) == 0
    shown = capsys.readouterr().out
    assert "decays: the model's own" in shown and "chosen: window" in shown
    data = json.loads(tuned.read_text())
    choice = data["choice"]
    assert choice["state_dtype"] != "float32" and choice["max_draft_len"] == 2 and choice["state_read_dtype"] == "same"
    assert len(data["candidates"]) == 6 and data["setting"]["batch"] == 2
    build = ["build", "--checkpoint_dir", str(folder), "--engine_flavour", "embedded", "--tuned", str(tuned)]
    assert main([*build, "--output_dir", str(tmp_path / "engine")]) == 0
    replay = EngineConfig.read(tmp_path / "engine").replay
    assert (replay.window, replay.state_dtype, replay.max_draft_len) == (
        choice["replay_window"],
        choice["state_dtype"],
        2,
    )
    explicit = ["--replay_window", "12", "--state_dtype", "float32"]
    assert main([*build, "--output_dir", str(tmp_path / "other"), *explicit]) == 0
    replay = EngineConfig.read(tmp_path / "other").replay
    assert (replay.window, replay.state_dtype, replay.max_draft_len) == (12, "float32", 2)
    assert "--replay_window 12 is given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data["shapes"]["layers"][0].update(count=7), "tuned for other recurrent layers"),
        (lambda data: data["shapes"].update(tp_size=4), "tuned for 4 ranks"),
        (lambda data: data["shapes"].update(dtype="float16"), "tuned for activations in float16"),
        (lambda data: data["choice"].update(replay_window="16"), "was not written by tune"),
        (lambda data: data["choice"].update(replay_window=99), "replay_window is 99"),
        (lambda data: data["choice"].update(surplus=1), "was not written by tune"),
        (lambda data: data.update(format_version=99), "has format_version 99"),
        (lambda data: data["setting"].update(batch="2"), "was not written by tune"),
        (lambda data: data.pop("machine"), "was not written by tune"),
        (lambda data: data.update(held=[]), "was not written by tune"),
        (lambda data: data.clear(), "was not written by tune"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path,
    written: tuple[Path, str],
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Any], None],
    message: str,
) -> None:
    folder, text = written
    data = json.loads(text)
    damage(data)
    (tmp_path / "tuned.json").write_text(json.dumps(data))
    build = ["build", "--checkpoint_dir", str(folder), "--output_dir", str(tmp_path / "engine")]
    assert main([*build, "--tuned", str(tmp_path / "tuned.json"), "--engine_flavour", "embedded"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 2 and not (tmp_path / "engine").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "\x00", "[" * 5000, '{"format_version": 2}'])
def test_what_is_no_file_of_tune_is_said_in_words(
    text: str, tmp_path: Path, written: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off, another kind of file, or another's JSON: no exception of Python's in the sentence."""
    (tmp_path / "tuned.json").write_bytes(text.encode("latin-1") + b"\xff" * (text == "{"))
    build = ["build", "--checkpoint_dir", str(written[0]), "--output_dir", str(tmp_path / "engine")]
    assert main([*build, "--tuned", str(tmp_path / "tuned.json"), "--engine_flavour", "embedded"]) == 1
    error = capsys.readouterr().err
    assert "was not written by tune" in error and "Error" not in error and error.count("\n") == 2


def test_layers_whose_recurrences_are_equal_are_one_group() -> None:
    """However their projections are stored, and whatever stands around them: a choice fits all of them."""
    delta = LAYERS[2]
    assert isinstance(delta, GatedDelta)
    others = (delta, replace(delta, gates_apart=True), replace(delta, output_scale=0.5))
    (group,) = subject(others).groups()
    assert group.count == 3
    same = [shapes(subject((layer,)).checkpoint) for layer in others]
    assert same[0] == same[1] == same[2] == json.loads(json.dumps(same[0]))
    assert shapes(subject((replace(delta, beta_scale=2.0),)).checkpoint) != same[0]


@pytest.mark.parametrize(
    ("options", "gpu", "said"),
    [
        ((), None, ["steps of 2 requests, and --max_batch_size is 1"]),
        (("--max_batch_size", "2"), None, []),
        (("--max_batch_size", "2"), "a CPU", []),
        (("--max_batch_size", "3"), "NVIDIA B300", ["measured on a CPU, and this machine has NVIDIA B300"]),
        (("--max_batch_size", "2", "--replay_fold", "derived"), None, ["--replay_fold is derived", "with exact"]),
    ],
    ids=["batch", "none", "the same GPU", "GPU", "fold"],
)
def test_an_engine_that_is_not_what_was_measured(
    options: tuple[str, ...],
    gpu: str | None,
    said: list[str],
    tmp_path: Path,
    written: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Built all the same, with a warning for each difference."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    (tmp_path / "tuned.json").write_text(written[1])
    build = ["build", "--checkpoint_dir", str(written[0]), "--output_dir", str(tmp_path / "engine")]
    more = ["--tuned", str(tmp_path / "tuned.json"), "--engine_flavour", "embedded", "--max_batch_size", "1"]
    assert main([*build, *more, *options]) == 0
    error = capsys.readouterr().err
    assert error.count("warning") == (1 if said else 0), error
    assert all(part in error for part in said), error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no CUDA GPU here"),
        (["--device", "cpu"], "there is no CUDA GPU here"),
        (["--batch_size", "0"], "--batch_size is 0"),
        (["--max_error", "nan"], "--max_error is nan"),
        (["--dtype", "float32"], "--dtype describes a --synthetic_config"),
        (["--dry_run", "--output", "tuned.json"], "--dry_run chooses nothing"),
        (["--output", "nowhere/tuned.json"], "nowhere is not a folder"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = checkpoint(tmp_path / "checkpoint")
    assert main(["tune", "--checkpoint_dir", str(folder), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") <= 2


def test_models_without_recurrent_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "checkpoint", (Mlp(96, "swiglu"),))
    assert main(["tune", "--checkpoint_dir", str(folder), "--dry_run"]) == 1
    assert "has no recurrent layers" in capsys.readouterr().err


def test_a_dry_run_lists_bytes_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["tune", "--synthetic_config", str(CONFIG), "--dry_run", "--draft_len", "4", "--windows", "4", "16"]
    assert main([*arguments, "--state_dtypes", "float32", "bfloat16", "--read_dtypes", "same"]) == 0
    shown = capsys.readouterr().out
    assert "recurrent layers of one rank: 23 x mamba2" in shown
    lines = [line.split() for line in shown.splitlines() if line.strip().startswith(("4 ", "16 "))]
    assert [line[:3] for line in lines] == [
        [w, state, "same"] for state in ("float32", "bfloat16") for w in ("4", "16")
    ]
    assert "shorter" in lines[0] and lines[1][3:5] == ["46.0", "MiB"]
    assert main([*arguments, "--state_dtypes", "float32", "bfloat16", "--max_slot_bytes", "40000000"]) == 0
    shown = capsys.readouterr().out
    within = {
        line.split()[1]: "more than --max_slot_bytes" not in line for line in shown.splitlines() if " 16   " in line
    }
    assert within == {"float32": False, "bfloat16": True}


def test_options_and_limits_are_those_of_the_documents() -> None:
    text = (Path(__file__).parents[1] / "docs" / "tune.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    assert [
        option for option in options if option not in ("--help", "--device", "--repeats") and option not in text
    ] == []
