"""The trained models (tests/data/trained) in the engine: bits per byte, greedy text, drafts, narrow states on real text."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

# Behind everything else: the package is to be found where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.accuracy import Comparison, pieces
from benchmarks.accuracy_formats import FORMATS
from benchmarks.accuracy_report import Result
from benchmarks.accuracy_variants import Variant, single_copy
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.demo.catalogue import TRAINED
from trtllm_replayssm.demo.models import load_checkpoint
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.speculation.options import SpeculationOptions
from trtllm_replayssm.runtime.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "data" / "trained"
ROWS, LENGTH = 16, 128
PROMPT = "import os\nimport sys\n\n\ndef main():\n    "


@dataclass(frozen=True)
class Trained:
    """model: of transformers, in float32. engine: the same weights, in float32."""

    name: str
    model: Any
    engine: Engine
    tokens: torch.Tensor

    def comparison(self) -> Callable[[Variant], Result]:
        """Measures variants. The first, the baseline, is to have a float32 state that is rewritten at every token."""
        made = Comparison(self.engine, self.tokens, 1.0)

        def measured(variant: Variant) -> Result:
            result = made.results([variant])[variant]
            assert isinstance(result, Result)
            return result

        return measured


@pytest.fixture(scope="module", params=TRAINED)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    convert(FOLDER / name, folder / "checkpoint", dtype="float32")
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions(ROWS, 2 * LENGTH, max_draft_len=3))
    engine = Engine.load(folder / "engine", device="cpu")
    # From all over the text, so that one file does not decide.
    text = (FOLDER / "held_out.txt").read_text(encoding="utf-8")
    spread = "".join(text[i * len(text) // ROWS :][:LENGTH] for i in range(ROWS))
    tokens, bytes_per_token = pieces(Tokenizer(engine.folder), spread, ROWS, LENGTH)
    assert bytes_per_token == 1.0
    return Trained(name, load_checkpoint(FOLDER / name), engine, tokens)


def test_bits_per_byte_and_narrow_states(trained: Trained) -> None:
    """One pass over the text a variant: transformers' figure; read copies cost next to nothing, narrow states more."""
    measured = trained.comparison()
    plain, usual = ReplayConfig(window=1), ReplayConfig(window=16)
    standard = measured(Variant("standard", plain))
    replayed = measured(Variant("window", usual))
    copied = measured(Variant("copy", replace(usual, state_read_dtype="nvfp4")))
    single = measured(Variant("single", plain, single_copy(FORMATS["nvfp4"])))

    with torch.no_grad():
        logits = trained.model(input_ids=trained.tokens.long(), use_cache=False).logits
    true = logits.log_softmax(-1)[:, :-1].gather(-1, trained.tokens[:, 1:, None].long())
    wanted = -true.double().mean().item() / math.log(2)
    assert standard.bits_per_byte == pytest.approx(wanted, rel=1e-6)
    assert replayed.bits_per_byte == pytest.approx(wanted, rel=1e-6)
    # It has learnt: bytes that nobody has learnt take 8 bits, or 5 by their frequencies alone.
    assert 1 < wanted < 2.2

    # Measured: at most 0.07 % for the copy, and 0.24 % (Mamba-2), 1.2 % and 1.4 % for a state that is rounded at every token.
    costs = [result.bits_per_byte / standard.bits_per_byte - 1 for result in (copied, single)]
    assert abs(costs[0]) < 0.002 and copied.agreement > 0.98
    assert costs[1] > (0.001 if trained.name == "mamba2" else 0.005)
    drifts = [sum(result.drift) for result in (replayed, copied, single)]
    assert drifts[0] < 1e-3 * drifts[1] and 3 * drifts[1] < drifts[2]


def test_greedy_text_is_that_of_transformers_with_and_without_drafts(trained: Trained) -> None:
    folder, count = trained.engine.folder, 96
    prompt = Tokenizer(folder).encode(PROMPT, add_special_tokens=False)
    with torch.no_grad():
        wanted = trained.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :]
    plain, speculating = LLM(folder, device="cpu"), LLM(folder, device="cpu", speculation=SpeculationOptions("ngram"))
    for llm in (plain, speculating):
        output = llm.generate(prompt, SamplingParams(max_tokens=count))
        assert not isinstance(output, list)
        assert output.outputs[0].token_ids == wanted.tolist()
    found = speculating.scheduler.statistics
    assert found.acceptance_length > 1.2 and 0 < found.num_accepted_draft_tokens < found.num_draft_tokens
    assert plain.scheduler.statistics.acceptance_length == 1


@pytest.mark.parametrize("name", TRAINED)
def test_cards_and_files_are_fit_to_be_shared(name: str) -> None:
    folder = FOLDER / name
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    bits = record["held_out_bits_per_byte"]
    assert f"| {bits:.4f} bits a byte" in card
    assert f"| `{name}` | {TRAINED[name]} | {bits:.3f} |" in (FOLDER / "README.md").read_text(encoding="utf-8")
    written = card + "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.json"))
    assert not any(place in written for place in ("/tmp", "/home", "/root", "/work"))
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in FOLDER.rglob("*") if path.is_file())
