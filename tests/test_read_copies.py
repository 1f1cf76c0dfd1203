"""Engines whose decode steps read narrow copies of their states: options, memory, exactness, texts, ranks."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_speculation import drafter, requests, run

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.plugins.reference.read_copy import quantise
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session

#: States 32 wide, a block of fp8. Their branches are small beside the stream, so that a choice of a token is not decided by
#: what a copy rounds away.
RECURRENT: dict[str, Layer] = {
    "mamba2": Mamba2(8, 16, 32, 2, 4, 1e-5, output_scale=0.02),
    "gated_delta": GatedDelta(2, 4, 32, 16, 4, 1e-6, output_scale=0.02),
    "kda": Kda(2, 32, 4, 1e-6, output_scale=0.02),
}
ATTENTION = Attention(4, 2, 16, 0.25, Rope(16, 1e4))
OPTIONS = BuildOptions(max_batch_size=3, max_seq_len=120, max_num_tokens=60, replay_window=8, max_draft_len=4)
FORMATS = ("fp8", "nvfp4")

both_formats = pytest.mark.parametrize("read_dtype", FORMATS)


def model(*layers: Layer, **options: Any) -> HybridDecoder:
    return HybridDecoder(synthetic.VOCAB_SIZE, 64, 1e-5, (*layers, ATTENTION, Mlp(96, "swiglu")), **options)


#: All three kinds, and a prediction head.
ALL_KINDS = model(*RECURRENT.values(), mtp=Mtp((replace(ATTENTION, num_kv_heads=1), Mlp(48, "swiglu"))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_engine(tmp_path_factory.mktemp("read_copies") / "engine", ALL_KINDS, OPTIONS)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return synthetic.load(folder)


def session(engine: Engine, read_dtype: str, snapshots: int = 0, **changes: Any) -> Session:
    """On pools that hold what nobody may use."""
    made = Session(synthetic.with_replay(engine, state_read_dtype=read_dtype, **changes), snapshots)
    for pool in made.pools.values():
        synthetic.spoiled(pool)
    return made


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, synthetic.VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def verify(made: Session, slot: int, ids: torch.Tensor, drafts: int, kept: int) -> torch.Tensor:
    """One step of that many tokens; those behind ``kept`` are rejected. Logits of the others."""
    start = made.committed()[slot]
    given = ids[start : start + drafts].clone()
    given[kept:] = (given[kept:] + 1) % synthetic.VOCAB_SIZE
    logits = made.step(given[None], slot)[0, :kept]
    made.commit(slot, [kept])
    return logits


# ---- options and memory ----------------------------------------------------------------------------------------------


def test_an_engine_keeps_its_option_and_an_old_one_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = synthetic.write_checkpoint(tmp_path / "checkpoint", ALL_KINDS)
    output = tmp_path / "engine"
    given = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(output), "--max_seq_len", "64"]
    assert main(["build", *given, "--state_read_dtype", "nvfp4"]) == 0
    config = EngineConfig.read(output)
    assert config.replay.state_read_dtype == "nvfp4"
    kinds = {name.rpartition(".")[2]: pool.kind for name, pool in config.pools().items()}
    assert {name for name, kind in kinds.items() if kind == "copy"} == set(copy_names("nvfp4"))
    assert main(["inspect", str(output)]) == 0
    assert "read as nvfp4" in capsys.readouterr().out
    # Engines from before there were copies.
    path = output / "config.json"
    data = json.loads(path.read_text())
    del data["pretrained_config"]["replayssm"]["replay"]["state_read_dtype"]
    path.write_text(json.dumps(data))
    assert EngineConfig.read(output).replay.state_read_dtype == "same"
    data["pretrained_config"]["replayssm"]["replay"]["state_read_dtype"] = "fp4"
    path.write_text(json.dumps(data))
    assert main(["inspect", str(output)]) != 0


def test_what_a_build_cannot_keep_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = model(replace(RECURRENT["mamba2"], state_size=48))
    checkpoint = synthetic.write_checkpoint(tmp_path / "checkpoint", narrow)
    given = ["build", "--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    assert main([*given, "--state_read_dtype", "fp8"]) != 0
    error = capsys.readouterr().err
    assert "fp8 needs states whose width is a multiple of 32; it is 48" in error
    assert "use --state_read_dtype nvfp4, or same" in error
    assert not (tmp_path / "engine").exists()
    assert main([*given, "--state_read_dtype", "nvfp4", "--replay_fold", "derived"]) != 0
    assert "replay_fold derived does not go with state_read_dtype nvfp4" in capsys.readouterr().err
    assert main([*given, "--state_read_dtype", "nvfp4"]) == 0


@both_formats
def test_copies_count_as_memory(engine: Engine, read_dtype: str) -> None:
    plain, made = session(engine, "same"), session(engine, read_dtype)
    counted, state = made.state_bytes(), 8 * 16 * 32 + 4 * 16 * 32 + 2 * 32 * 32
    # A slot of a pool is a multiple of 256 bytes.
    if read_dtype == "fp8":
        assert counted["copy"] == 3 * (state + sum(-(-elements // 32 // 256) * 256 for elements in (4096, 2048, 2048)))
    else:
        assert counted["copy"] == 3 * (
            state // 2 + sum(elements // 16 for elements in (4096, 2048, 2048)) + 2 * 128 + 3 * 256
        )
    assert sum(counted.values()) == 3 * made.engine.config.slot_bytes()
    del counted["copy"]
    assert counted == plain.state_bytes()
    assert "copy" not in plain.state_bytes()


def test_too_large_copies_are_no_surprise_of_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission counts them: a device that just holds the plain state does not start."""
    from trtllm_replayssm.runtime import devices

    config = engine.config
    monkeypatch.setattr(devices, "available_bytes", lambda device: config.max_batch_size * config.slot_bytes())
    session(engine, "same")
    with pytest.raises(EngineError, match="free"):
        session(engine, "fp8")


# ---- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECURRENT)
@both_formats
def test_a_layers_checkpoint_is_the_one_without_a_copy(tmp_path: Path, kind: str, read_dtype: str) -> None:
    """The first layer sees the same inputs, whatever reads: its state and ring are the same bits after rejected drafts,
    chunked prefill, preemption, resumption elsewhere and a materialised prefix; the copy is that of its state."""
    engine = synthetic.load(synthetic.write_engine(tmp_path / "engine", model(RECURRENT[kind]), OPTIONS))
    ids, sessions = tokens(120), [session(engine, choice, snapshots=1) for choice in ("same", read_dtype)]
    answers = []
    for made in sessions:
        choose = random.Random(0)
        made.prefill(0, ids[:40])
        answers.append(made.hidden.flatten().tolist())
        while (done := made.committed()[0]) < 100:
            drafts = choose.choice((1, 2, 5))
            verify(made, 0, ids, drafts, choose.randint(1, drafts))
            if choose.random() < 0.2:
                saved = made.save(0)
                made.admit(0)
                made.prefill(0, tokens(7, seed=done))
                made.restore(0, saved)
        made.materialise(0, 3, made.committed()[0])
        made.restore(1, made.save(3))
        verify(made, 1, ids, 5, 3)
        verify(made, 1, ids, 5, 5)
    plain, copied = sessions
    assert answers[0] == answers[1], "a prefill reads the checkpoint"
    assert plain.rewrites == copied.rewrites > 10
    layer = f"transformer.layers.0.{kind}"
    for name in (name for name in plain.pools if name.startswith(layer)):
        for slot in (0, 1, 3):
            assert torch.equal(plain.pools[name][slot].nan_to_num(7), copied.pools[name][slot].nan_to_num(7)), name
    stored = quantise(copied.pools[f"{layer}.state"][[0, 1, 3]], read_dtype)
    for name, value in stored.items():
        assert torch.equal(copied.pools[f"{layer}.{name}"][[0, 1, 3]], value), name


@both_formats
def test_preempted_and_resumed_is_bit_for_bit_the_undisturbed_run(engine: Engine, read_dtype: str) -> None:
    ids, made, witness = tokens(60), session(engine, read_dtype), session(engine, read_dtype)
    for run_of in (made, witness):
        run_of.prefill(0, ids[:17])
    for step in range(9):
        at = 0 if step < 4 else 2
        if step == 4:
            saved = made.save(0)
            made.admit(0)
            made.prefill(0, tokens(20, seed=5))
            made.restore(2, saved)
        assert torch.equal(verify(made, at, ids, 5, 1 + step % 5), verify(witness, 0, ids, 5, 1 + step % 5))


def ask(made: Scheduler, name: int, prompt: list[int]) -> Request:
    asked = Request(name, prompt, SamplingParams(max_tokens=20, return_generation_logits=True), frozenset(), None)
    run(made, [asked])
    return asked


@both_formats
def test_prefix_cache_changes_no_bit(engine: Engine, read_dtype: str) -> None:
    caching = Scheduler(session(engine, read_dtype))
    caching.prefix_cache = PrefixCache(caching.session, 1 << 24)
    chunk, system = engine.config.prefill_chunk, tokens(40).tolist()
    ask(caching, 0, [*system, 3])
    for tail in ([7], [8, 9, 10]):
        resumed = ask(caching, 1, [*system, *tail])
        alone = ask(Scheduler(session(engine, read_dtype)), 1, [*system, *tail])
        assert resumed.cached_tokens == 2 * chunk
        assert resumed.tokens == alone.tokens
        assert torch.equal(torch.stack(resumed.logits), torch.stack(alone.logits))


@both_formats
def test_texts_do_not_depend_on_their_neighbours(engine: Engine, read_dtype: str) -> None:
    asked = requests(3, return_generation_logits=True)
    run(Scheduler(session(engine, read_dtype)), asked)
    for request in asked:
        alone = Request(0, request.prompt, request.params, frozenset(), None)
        run(Scheduler(session(engine, read_dtype)), [alone])
        assert alone.tokens == request.tokens
        torch.testing.assert_close(torch.stack(alone.logits), torch.stack(request.logits), rtol=0, atol=2e-3)


# ---- texts -----------------------------------------------------------------------------------------------------------


def texts(engine: Engine, read_dtype: str, kind: str = "plain") -> tuple[list[Request], Scheduler]:
    """Greedy texts with their logits, with and without drafts."""
    target, asked = session(engine, read_dtype), requests(0, return_generation_logits=True)
    made = Scheduler(target, drafter(kind, target, {}))
    run(made, asked)
    return asked, made


@pytest.mark.parametrize(("read_dtype", "rounding"), [("fp8", 0.05), ("nvfp4", 0.15)])
@pytest.mark.parametrize("kind", ["ngram", "mtp", "draft_model"])
def test_greedy_text_with_drafts_is_the_text_without(
    engine: Engine, read_dtype: str, rounding: float, kind: str
) -> None:
    """Drafts move the steps that fold, and with them what copies round away. A text therefore goes its own way only where
    two tokens were nearly as good; until there its logits are the same but for that."""
    (expected, _), (found, made) = texts(engine, read_dtype), texts(engine, read_dtype, kind)
    assert made.statistics.num_accepted_draft_tokens > 0 or kind == "mtp"
    equal = 0
    for want, got in zip(expected, found, strict=True):
        alike = next((i for i, (a, b) in enumerate(zip(want.tokens, got.tokens)) if a != b), len(want.tokens))
        equal += alike == len(want.tokens)
        theirs, ours = torch.stack(want.logits[: alike + 1]), torch.stack(got.logits[: alike + 1])
        assert (theirs - ours).abs().max() < rounding
        if alike < len(want.tokens):
            chosen = [want.tokens[alike], got.tokens[alike]]
            assert abs(float(theirs[alike, chosen].diff())) < rounding
    assert equal >= len(expected) - 2


@pytest.mark.parametrize(("read_dtype", "most"), [("fp8", 3e-2), ("nvfp4", 1e-1)])
def test_logits_move_by_what_the_copy_rounds(engine: Engine, read_dtype: str, most: float) -> None:
    """Decode and verify steps differ from reads of the state, by more than float32 rounds and less than a copy may."""
    ids, (plain, copied) = tokens(110), (session(engine, choice) for choice in ("same", read_dtype))
    differences = []
    for made in (plain, copied):
        made.prefill(0, ids[:40])
    while plain.committed()[0] < 100:
        want, got = verify(plain, 0, ids, 5, 3), verify(copied, 0, ids, 5, 3)
        differences.append(float((got - want).norm() / want.norm()))
    assert min(differences) > 1e-4
    assert max(differences) < most


# ---- ranks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    folder: Path
    result: Path


def converse(folder: Path) -> dict[str, torch.Tensor]:
    made, ids = session(Engine.load(folder, device="cpu"), "nvfp4", snapshots=1), tokens(80)
    made.prefill(0, ids[:23])
    found = {f"verify{step}": verify(made, 0, ids, 5, 1 + step % 5) for step in range(8)}
    made.materialise(0, 3, made.committed()[0])
    made.restore(1, made.save(3))
    return found | {"resumed": verify(made, 1, ids, 4, 4)}


def save_conversation(job: Job) -> int:
    save_file({k: v.contiguous() for k, v in converse(job.folder).items()}, f"{job.result}.{dist.get_rank()}")
    return 0


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """A head's scales are its own, so that ranks round what one alone does; sums over ranks differ in their last bits,
    which now and then moves a code."""
    one = synthetic.write_engine(tmp_path / "one", ALL_KINDS, OPTIONS)
    two = synthetic.write_engine(tmp_path / "two", ALL_KINDS, OPTIONS, tp_size=2)
    assert run_ranks(2, save_conversation, Job(two, tmp_path / "found"), "cpu") == 0
    expected = converse(one)
    for rank in range(2):
        found = load_file(f"{tmp_path / 'found'}.{rank}")
        assert found.keys() == expected.keys()
        for name, logits in expected.items():
            torch.testing.assert_close(found[name], logits, rtol=0, atol=2e-3)


# ---- commands --------------------------------------------------------------------------------------------------------


@both_formats
def test_commands_run_on_copies(read_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """generate, with drafts and the prefix cache; and the speed of an engine with random weights."""
    text_model = replace(ALL_KINDS, vocab_size=synthetic.TEXT_VOCAB_SIZE)
    options = replace(OPTIONS, state_read_dtype=read_dtype)
    folder = synthetic.write_engine(tmp_path / "engine", text_model, options, text=True)
    given = ["generate", "--engine_dir", str(folder), "--input_text", "a copy of a copy of a", "--max_output_len", "20"]
    outputs = []
    for more in ([], ["--prefix_cache_gib", "0.1"], ["--speculative_decoding_mode", "ngram"]):
        assert main([*given, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0]
    assert outputs[0] == outputs[1]
    config = Path(__file__).parent / "data" / "configs" / "mamba2_2_7b.json"
    data = json.loads(config.read_text()) | {"n_layer": 2, "d_model": 256, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(data))
    bench = ["bench", "--synthetic_config", str(tmp_path / "config.json"), "--state_read_dtype", read_dtype]
    sizes = ["--num_requests", "2", "--input_len", "20", "--output_len", "4", "--device", "cpu", "--dtype", "float32"]
    assert main([*bench, *sizes, "--report_json", str(tmp_path / "report.json")]) == 0
    assert '"copy"' in (tmp_path / "report.json").read_text()
