"""Two ranks on two GPUs, with the CUDA kernels, CUDA graphs and NCCL, against one; from one command, and ending together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.session import Session

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

ATTENTION = Attention(4, 2, 64, 0.125)
MOE = Moe(8, 3, 32, "swiglu", "softmax", shared=Mlp(48, "swiglu"))
MAMBA2, _, GATED_DELTA, _, KDA = synthetic.REAL_HEADS
#: One model of each recurrence with its own kind of feed-forward layer, and one of every layer there is.
MODELS = {
    "mamba2-dense": (MAMBA2, Mlp(96, "relu2"), ATTENTION, Mlp(96, "relu2")),
    "mamba2-moe": (MAMBA2, MOE, ATTENTION, MOE),
    "gated_delta-dense": (GATED_DELTA, Mlp(96, "swiglu"), ATTENTION, Mlp(96, "swiglu")),
    "gated_delta-moe": (GATED_DELTA, MOE, ATTENTION, MOE),
    "kda-dense": (KDA, Mlp(96, "swiglu"), ATTENTION, Mlp(96, "swiglu")),
    "kda-moe": (KDA, MOE, ATTENTION, MOE),
    "every-kind": synthetic.LAYERS,
}
OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=256)
REPLAY = ReplayConfig(window=8, max_draft_len=3)
#: Relative to the norm of the logits. Sums over ranks are taken in another order; partial sums are rounded to bfloat16.
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}


def run_session(folder: Path, cuda_graphs: bool) -> dict[str, torch.Tensor]:
    """Prefill, drafts of which some are rejected, decode over whole windows, a snapshot, resuming in another slot."""
    session = Session(Engine.load(folder, plugin_impl="cuda"), snapshot_slots=1, cuda_graphs=cuda_graphs)
    for pool in session.pools.values():
        pool.fill_(float("nan") if pool.is_floating_point() else -1)
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 90), generator=torch.Generator().manual_seed(0))
    found = {"prefill": session.step(ids[:, :37], modes=[RowMode.ABSORB] * 2)}
    session.commit(0, [37, 37])
    start = 37
    for step, kept in enumerate((3, 1, 4, 2, 2)):
        # Rejected drafts hold other tokens than what follows; only logits of accepted tokens are compared.
        drafts = ids[:, start : start + 4].clone()
        drafts[:, kept:] = 7
        found[f"verify{step}"] = session.step(drafts)[:, :kept]
        session.commit(0, [kept, kept])
        start += kept
    for step in range(18):
        found[f"decode{step}"] = session.step(ids[:1, start : start + 1])
        session.commit(0, [1])
        start += 1
    session.materialise(0, 2, start)
    session.restore(1, session.save(2, "cpu"))
    found["resumed"] = session.step(ids[:1, start : start + 3], first_slot=1)
    return {name: logits.float().cpu().contiguous() for name, logits in found.items()}


@dataclass(frozen=True)
class Job:
    folder: Path
    result: Path


def save_sessions(job: Job) -> int:
    """Every rank saves what it found, with CUDA graphs and without."""
    for graphs in (False, True):
        save_file(run_session(job.folder, graphs), f"{job.result}.{dist.get_rank()}.{graphs}")
    return 0


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_equal_one(tmp_path: Path, name: str, dtype: str) -> None:
    model = HybridDecoder(synthetic.VOCAB_SIZE, 64, 1e-5, MODELS[name])
    one = synthetic.write_engine(tmp_path / "one", model, OPTIONS, dtype=dtype, replay=REPLAY)
    two = synthetic.write_engine(tmp_path / "two", model, OPTIONS, tp_size=2, dtype=dtype, replay=REPLAY)
    assert run_ranks(2, save_sessions, Job(two, tmp_path / "found")) == 0
    expected = run_session(one, cuda_graphs=True)
    eager, graphs = ([load_file(tmp_path / f"found.{rank}.{on}") for rank in range(2)] for on in (False, True))
    for key, logits in expected.items():
        assert logits.std() > 0.3
        assert float((graphs[0][key] - logits).norm() / logits.norm()) < BOUNDS[dtype], key
        assert torch.equal(graphs[0][key], graphs[1][key])
        assert torch.equal(graphs[0][key], eager[0][key])


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With text and room for drafts, for one GPU and for two."""
    folder = tmp_path_factory.mktemp("ranks")
    built = [
        synthetic.write_engine(folder / str(tp_size), options=OPTIONS, text=True, tp_size=tp_size, replay=REPLAY)
        for tp_size in (1, 2)
    ]
    return built[0], built[1]


def command(*words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-P", "-m", "trtllm_replayssm", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.parametrize("speculation", [(), ("--speculative_decoding_mode", "ngram")], ids=["plain", "ngram"])
def test_generate_on_two_gpus(engines: tuple[Path, Path], tmp_path: Path, speculation: tuple[str, ...]) -> None:
    rows = tmp_path / "in.jsonl"
    prompt = list(range(2, 50)) * 2
    rows.write_text("".join(json.dumps({"input_ids": [*prompt[:length], 9]}) + "\n" for length in (90, 3, 90, 81, 90)))
    words = ("--input_file", rows, "--max_output_len", 20, "--end_id", -1, "--prefix_cache_gib", 0.5, *speculation)
    one, two = (command("generate", "--engine_dir", engine, *words) for engine in engines)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert len(two.stdout.splitlines()) == 5
    assert " 0 of " not in two.stderr


def test_bench_on_two_gpus(engines: tuple[Path, Path], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ("--num_requests", 8, "--input_len", 20, "--output_len", 20, "--request_rate", 200, "--report_json", report)
    done = command("bench", "--engine_dir", engines[1], *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["world_info"]["tp_size"] == 2
    assert json.loads(report.read_text())["request_info"]["num_requests"] == 8


# ---- ranks that are lost ---------------------------------------------------------------------------------------------


def kill_rank_one(folder: Path) -> int:
    """Rank 1 is killed while rank 0 waits for it inside NCCL."""
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    tensor = torch.ones(8, device=f"cuda:{dist.get_rank()}")
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return 0


def test_a_lost_rank_ends_all_with_one_sentence(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"^rank 1 was ended by SIGKILL; all ranks were stopped$"):
        run_ranks(2, kill_rank_one, tmp_path)
    assert time.monotonic() - begun < 60
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
