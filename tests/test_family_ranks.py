"""Every family cut for two ranks computes what transformers computes: projections are split segment by segment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_models import MODELS
from safetensors.torch import load_file, save_file
from test_parity import absorb, case, decode

from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.session import Session

#: More than indexers choose from.
PROMPT, TOKENS = 21, 27
OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=TOKENS, max_num_tokens=64)


@dataclass(frozen=True)
class Job:
    """Engines below ``root``, one a model; their logits are written beside them."""

    root: Path
    ids: torch.Tensor


def run_all(job: Job) -> int:
    """Prefill and decode of every model on this rank."""
    for name in MODELS:
        session = Session(Engine.load(job.root / name / "engine", device="cpu"))
        logits = torch.cat([absorb(session, job.ids[:, :PROMPT]), decode(session, job.ids[:, PROMPT:])], 1)
        save_file({"logits": logits.contiguous()}, job.root / name / f"logits.{dist.get_rank()}")
    return 0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models in one pair of processes, whose start takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in MODELS:
        hub = Path(case(name).folder.name) / "hf"
        convert(hub, folder / name / "checkpoint", tp_size=2, warn=lambda message: None)
        build_engine(folder / name / "checkpoint", folder / name / "engine", OPTIONS)
    assert run_ranks(2, run_all, Job(folder, case(next(iter(MODELS))).ids[:2, :TOKENS]), "cpu") == 0
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_transformers(name: str, root: Path) -> None:
    for rank in range(2):
        case(name).check(load_file(root / name / f"logits.{rank}")["logits"], slice(0, 2), 0)
