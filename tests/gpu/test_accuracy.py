"""The accuracy report on a GPU: a graph a token, several variants side by side, against a session's steps and commits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import Comparison, pieces
from benchmarks.accuracy_report import Result
from benchmarks.accuracy_runs import GraphRun, Run, compile_kernels, feed_all, prepared
from benchmarks.accuracy_variants import BASELINE, Variant, variants
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tokenizer import Tokenizer

TRAINED = Path(__file__).parents[1] / "data" / "trained"
ROWS, LENGTH = 3, 300  # past the first bound of the KV cache
#: Of the variants these do everything that one of them does: states rewritten, replayed, copied, rounded at random, emulated.
NAMES = (
    BASELINE,
    "float32, window 4",
    "nvfp4 read copy, window 16",
    "bfloat16, window 16, rounded at random",
    "float32, window 16, derived fold of float16 updates",
    "int8 single copy, standard",
    "nvfp4 single copy, window 16",
)


class Made:
    """A trained model's engine in float32, texts, and what each of NAMES makes of them by steps and commits."""

    def __init__(self, name: str, folder: Path) -> None:
        convert(TRAINED / name, folder / "checkpoint", dtype="float32")
        build_engine(folder / "checkpoint", folder / "engine", BuildOptions(ROWS, LENGTH, 256, replay_window=1))
        self.engine = Engine.load(folder / "engine", device="cuda")
        text = (TRAINED / "held_out.txt").read_text()
        self.tokens, _ = pieces(Tokenizer(self.engine.folder), text, ROWS, LENGTH)
        self.variants = [v for v in variants(self.engine.config.checkpoint, [4, 16]) if v.name in NAMES]
        compile_kernels([self.of(variant) for variant in self.variants])
        self.plain = [Run(Session(self.of(variant)), self.tokens) for variant in self.variants]
        feed_all(self.plain)

    def of(self, variant: Variant) -> Engine:
        return variant.engine(self.engine, ROWS)


@pytest.fixture(scope="module", params=["mamba2", "gated_delta", "kda"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp(request.param))


def test_graphs_side_by_side_give_the_bits_of_steps(made: Made) -> None:
    streams = [torch.cuda.Stream() for _ in made.variants]
    runs = [prepared(Session(made.of(v)), made.tokens, stream) for v, stream in zip(made.variants, streams)]
    assert all(isinstance(run, GraphRun) for run in runs)
    feed_all(runs)
    for variant, plain, run in zip(made.variants, made.plain, runs, strict=True):
        wanted, found = plain.found(), run.found()
        assert torch.equal(wanted.bits, found.bits), variant.name
        assert torch.equal(wanted.best, found.best), variant.name
        assert wanted.rewrites == found.rewrites > 0
        assert torch.equal(plain.session.cursors, run.session.cursors)
        for name, pool in plain.session.pools.items():
            if pool.dtype.is_floating_point and not name.endswith((".k", ".v")):
                bits = (x.pools[name].contiguous().view(torch.uint8) for x in (plain.session, run.session))
                assert torch.equal(*bits), (variant.name, name)


def test_a_report_has_those_numbers_in_groups(made: Made) -> None:
    comparison = Comparison(made.engine, made.tokens, 1.0, parallel=3)
    results: list[Result] = []
    for first in range(0, len(made.variants), 3):
        group = made.variants[first : first + 3]
        outcomes = comparison.results(group)
        assert list(outcomes) == group
        results += [outcome for outcome in outcomes.values() if isinstance(outcome, Result)]
    wanted = [run.found() for run in made.plain]
    assert [result.bits_per_byte for result in results] == [found.bits.double().mean().item() for found in wanted]
    assert sum(results[0].drift) == 0 and all(sum(result.drift) > 0 for result in results[1:])
