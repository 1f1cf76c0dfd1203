"""Two ranks on two GPUs, with the CUDA kernels, CUDA graphs and NCCL, against one; from one command, and ending together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import rank_work
import synthetic
from processes import with_command

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions
from trtllm_replayssm.runtime.ranks import run_ranks

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
#: Of float32 logits, relative to their norm: sums over ranks are taken in another order.
TOLERANCE = 1e-4
#: 16-bit logits of two ranks may be so much further from float32 than those of one: partial sums are rounded once more.
ROUNDING = 1.5


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of all logits together: those of one token scatter."""
    ours, theirs = (torch.cat([logits[name].flatten() for name in exact]) for logits in (found, exact))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_equal_one(tmp_path: Path, name: str, dtype: str) -> None:
    model = HybridDecoder(synthetic.VOCAB_SIZE, 64, 1e-5, MODELS[name])

    def built(folder: str, dtype: str, tp_size: int = 1) -> Path:
        return synthetic.write_engine(tmp_path / folder, model, OPTIONS, tp_size=tp_size, dtype=dtype, replay=REPLAY)

    two = built("two", dtype, tp_size=2)
    assert run_ranks(2, rank_work.save_sessions, rank_work.Job(two, tmp_path / "found")) == 0
    one = rank_work.run_session(built("one", dtype), cuda_graphs=True)
    exact = rank_work.run_session(built("exact", "float32"), cuda_graphs=True)
    eager, graphs = ([load_file(tmp_path / f"found.{rank}.{on}") for rank in range(2)] for on in (False, True))
    assert error(graphs[0], exact) < (TOLERANCE if dtype == "float32" else ROUNDING * error(one, exact))
    for key, logits in exact.items():
        assert logits.std() > 0.3
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


#: Words before ``-m trtllm_replayssm``: the command starts its ranks by itself, or torchrun does.
LAUNCHERS = {"command": (), "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")}
#: A checkout in the working folder must not hide the package, in no process of several.
ENVIRONMENT = os.environ | {"PYTHONSAFEPATH": "1"}


def line(*words: object, launcher: str = "command") -> list[str]:
    return [sys.executable, *LAUNCHERS[launcher], "-m", "trtllm_replayssm", *map(str, words)]


def command(*words: object, launcher: str = "command") -> subprocess.CompletedProcess[str]:
    return subprocess.run(line(*words, launcher=launcher), capture_output=True, text=True, timeout=180, env=ENVIRONMENT)


NGRAM = ("--speculative_decoding_mode", "ngram")


@pytest.mark.parametrize(
    ("launcher", "speculation"), [("command", ()), ("command", NGRAM), ("torchrun", ()), ("torchrun", NGRAM)]
)
def test_generate_on_two_gpus(
    engines: tuple[Path, Path], tmp_path: Path, launcher: str, speculation: tuple[str, ...]
) -> None:
    rows = tmp_path / "in.jsonl"
    prompt = list(range(2, 50)) * 2
    rows.write_text("".join(json.dumps({"input_ids": [*prompt[:length], 9]}) + "\n" for length in (90, 3, 90, 81, 90)))
    words = ("--input_file", rows, "--max_output_len", 20, "--end_id", -1, "--prefix_cache_gib", 0.5, *speculation)
    one = command("generate", "--engine_dir", engines[0], *words)
    two = command("generate", "--engine_dir", engines[1], *words, launcher=launcher)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert len(two.stdout.splitlines()) == 5
    assert " 0 of " not in two.stderr
    assert two.stderr.count("tokens/s") == 1


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_bench_on_two_gpus(engines: tuple[Path, Path], tmp_path: Path, launcher: str) -> None:
    report = tmp_path / "report.json"
    words = ("--num_requests", 8, "--input_len", 20, "--output_len", 20, "--request_rate", 200, "--report_json", report)
    done = command("bench", "--engine_dir", engines[1], *words, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["world_info"]["tp_size"] == 2
    assert json.loads(report.read_text())["request_info"]["num_requests"] == 8


# ---- ranks that are lost ---------------------------------------------------------------------------------------------


def test_a_lost_rank_ends_all_with_one_sentence(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"^rank 1 was ended by SIGKILL; all ranks were stopped$"):
        run_ranks(2, rank_work.kill_rank_one, tmp_path)
    assert time.monotonic() - begun < 60
    files = list(tmp_path.glob("pid*"))
    assert len(files) == 2
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


#: What the rank that is left may say: of a signal of torchrun's, or of what NCCL told it.
LAST_WORDS = {
    "command": r"rank 1 was ended by SIGKILL; all ranks were stopped",
    "torchrun": r"rank 0 was ended by SIGTERM while it waited for another rank"
    r"|another rank of the engine has ended, so this one cannot go on",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_lost_between_two_tokens(tmp_path: Path, launcher: str) -> None:
    """In the middle of a text, as a person sees it: one sentence, at once, and nobody left."""
    options = BuildOptions(max_batch_size=1, max_seq_len=32768, max_num_tokens=256)
    engine = synthetic.write_engine(tmp_path / "two", options=options, text=True, tp_size=2, replay=REPLAY)
    words = ("generate", "--engine_dir", engine, "--input_text", "Hello", "--end_id", -1, "--max_output_len", 32000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line(*words, launcher=launcher), text=True, env=ENVIRONMENT, **pipes) as process:
        try:
            assert process.stdout.read(1)
            ranks = ranks_of(psutil.Process(process.pid), launcher)
            ranks[1].kill()
            begun = time.monotonic()
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 1
    assert time.monotonic() - begun < 25
    (sentence,) = re.findall(r"^error: (.*)$", said, re.MULTILINE)
    assert re.fullmatch(LAST_WORDS[launcher], sentence)
    assert not psutil.wait_procs(ranks, 5)[1]


def ranks_of(launcher: psutil.Process, name: str) -> list[psutil.Process]:
    """By their rank."""
    sign = "spawn_main" if name == "command" else " -m trtllm_replayssm"
    found = with_command(launcher.children(), sign)
    assert len(found) == 2
    return sorted(found, key=lambda process: process.create_time())
