"""Tensor parallelism: two ranks compute what one does, run from one command, and end together."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import synthetic
import torch
import torch.distributed as dist
from processes import with_command
from safetensors.torch import load_file, save_file

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.ranks import run_ranks
from trtllm_replayssm.runtime.session import Session

#: fp32 logits of standard deviation 1; sums over ranks are taken in another order.
TOLERANCE = 3e-5
OPTIONS = BuildOptions(max_batch_size=2, max_seq_len=128, max_num_tokens=256, replay_window=8, max_draft_len=3)
#: Four heads share one key/value head, so with two ranks it is on both; the vocabulary is odd, so the head is padded.
MODELS = {"untied": synthetic.decoder(), "tied": synthetic.decoder(tie_embeddings=True)}


def run_session(folder: Path) -> dict[str, torch.Tensor]:
    """Prefill, drafts of which some are rejected, decode, a snapshot: everything that touches state."""
    session = Session(Engine.load(folder, device="cpu"), snapshot_slots=1)
    for pool in session.pools.values():
        pool.fill_(float("nan"))
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (2, 60), generator=torch.Generator().manual_seed(0))
    found = {"prefill": session.step(ids[:, :11], modes=[RowMode.ABSORB] * 2)}
    session.commit(0, [11, 11])
    start = 11
    for step, kept in enumerate((3, 1, 4, 2, 2)):
        found[f"verify{step}"] = session.step(ids[:, start : start + 4])
        session.commit(0, [kept, kept])
        start += kept
    found["decode"] = torch.cat([decode(session, ids[:1, start + i : start + i + 1]) for i in range(10)], 1)
    session.materialise(0, 2, start + 10)
    session.restore(1, session.save(2))
    found["resumed"] = session.step(ids[:1, start + 10 : start + 13], first_slot=1)
    return found


def decode(session: Session, token: torch.Tensor) -> torch.Tensor:
    logits = session.step(token)
    session.commit(0, [1])
    return logits


@dataclass(frozen=True)
class Job:
    folder: Path
    result: Path


def save_session(job: Job) -> int:
    """Every rank saves what it found."""
    save_file({k: v.contiguous() for k, v in run_session(job.folder).items()}, f"{job.result}.{dist.get_rank()}")
    return 0


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    attention = next(layer for layer in MODELS[name].layers if isinstance(layer, Attention))
    assert attention.num_kv_heads == 1
    assert MODELS[name].padded_vocab(2) == synthetic.VOCAB_SIZE + 1
    one = synthetic.write_engine(tmp_path / "one", MODELS[name], OPTIONS)
    two = synthetic.write_engine(tmp_path / "two", MODELS[name], OPTIONS, tp_size=2)
    assert run_ranks(2, save_session, Job(two, tmp_path / "found"), "cpu") == 0
    expected, ranks = run_session(one), [load_file(tmp_path / f"found.{rank}") for rank in range(2)]
    assert expected["decode"].std() > 0.5
    for key, logits in expected.items():
        assert logits.shape[-1] == synthetic.VOCAB_SIZE
        torch.testing.assert_close(ranks[0][key], logits, rtol=0, atol=TOLERANCE)
        assert torch.equal(ranks[0][key], ranks[1][key])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With text, for one rank and for two."""
    folder = tmp_path_factory.mktemp("tp")
    options = replace(OPTIONS, max_draft_len=0)
    one = synthetic.write_engine(folder / "one", options=options, text=True)
    return one, synthetic.write_engine(folder / "two", options=options, text=True, tp_size=2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def generate(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *launcher, "-m", "trtllm_replayssm", "generate", "--engine_dir", str(folder), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["command", "torchrun"])
def test_generate_starts_its_ranks_and_one_of_them_speaks(
    engines: tuple[Path, Path], tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "Hello"}\n{"input_ids": [5, 6, 7]}\n{"prompt": "A longer prompt of some length"}\n')
    words = ["--input_file", str(rows), "--max_output_len", "12", "--temperature", "0.8", "--device", "cpu"]
    logits = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    one = generate(engines[0], *words, "--generation_logits_file", logits[0])
    two = generate(engines[1], *words, "--generation_logits_file", logits[1], launcher=launcher)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout
    assert len(two.stdout.splitlines()) == 3
    assert two.stderr.count("tokens/s") == 1
    expected, found = map(load_file, logits)
    for row, tensor in expected.items():
        torch.testing.assert_close(found[row], tensor, rtol=0, atol=TOLERANCE)
        assert torch.isinf(found[row][:, synthetic.TEXT_TOKENS :]).all()


def test_ranks_on_two_nodes(engines: tuple[Path, Path], tmp_path: Path) -> None:
    """Two torchruns that know each other by one address; whichever gets rank 0 prints."""
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "Hello"}\n{"input_ids": [5, 6, 7]}\n')
    words = ("--input_file", str(rows), "--max_output_len", "12", "--device", "cpu")
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}")
    launcher = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *meeting)
    with ThreadPoolExecutor(2) as nodes:
        done = list(nodes.map(lambda node: generate(engines[1], *words, launcher=launcher), range(2)))
    assert [node.returncode for node in done] == [0, 0], done
    assert sorted(node.stdout for node in done) == ["", generate(engines[0], *words).stdout]


def test_generate_streams_from_one_rank(engines: tuple[Path, Path]) -> None:
    words = ("--input_text", "Hello", "--max_output_len", "8", "--device", "cpu")
    one, two = (generate(engine, *words) for engine in engines)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout != ""


def test_user_errors_of_ranks_are_said_once(engines: tuple[Path, Path]) -> None:
    done = generate(engines[1], "--input_text", "Hello", "--top_k", "-3", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: top_k is -3; it must be an integer, 0 or more"]
    assert done.stdout == ""


def test_values_that_are_no_numbers_are_said_once(engines: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engines[1], tmp_path / "engine")
    content = bytearray((folder / "rank1.engine").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header:] = b"\xff" * (len(content) - header)
    (folder / "rank1.engine").write_bytes(content)
    done = generate(folder, "--input_text", "Hello", "--device", "cpu")
    assert done.returncode == 1 and done.stdout.strip() == ""
    error, hint = done.stderr.splitlines()
    assert error == "error: the model computed values that are no numbers (NaN, or infinite)" and hint.startswith(
        "hint: "
    )


# ---- ranks that are lost ---------------------------------------------------------------------------------------------


def note_pid(folder: Path) -> None:
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))


def kill_rank_one(folder: Path) -> int:
    """Rank 1 is killed while rank 0 waits for it."""
    note_pid(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    return 0


def end_rank_one_without_a_name(folder: Path) -> int:
    """By a real-time signal."""
    note_pid(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 40)
    dist.all_reduce(torch.ones(1))
    return 0


def fail_on_rank_one(folder: Path) -> int:
    """Rank 1 fails by a fault of the program while rank 0 waits for ever."""
    note_pid(folder)
    if dist.get_rank() == 1:
        raise ZeroDivisionError("no such luck")
    time.sleep(1000)
    return 0


def refuse_on_both(folder: Path) -> int:
    raise UserError("the sentence", "the hint")


def leave_quietly(folder: Path) -> int:
    os._exit(7)


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (kill_rank_one, r"^rank 1 was ended by SIGKILL; all ranks were stopped$"),
        (end_rank_one_without_a_name, r"^rank 1 was ended by signal 40; all ranks were stopped$"),
        (fail_on_rank_one, r"^rank 1: ZeroDivisionError: no such luck$"),
        (refuse_on_both, r"^the sentence$"),
        (leave_quietly, r"^rank \d ended with status 7; all ranks were stopped$"),
    ],
)
def test_a_lost_rank_ends_all_with_one_sentence(tmp_path: Path, target: Any, match: str) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineError, match=match) as caught:
        run_ranks(2, target, tmp_path, "cpu")
    assert caught.value.hint == ("the hint" if target is refuse_on_both else "")
    assert time.monotonic() - begun < 60
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def start_long_work(folder: Path, rows: Path, result: Path) -> subprocess.Popen[str]:
    """The command, in a process group of its own, busy for minutes."""
    rows.write_text('{"input_ids": [5]}\n' * 400)
    words = ["generate", "--engine_dir", str(folder), "--input_file", str(rows), "--max_output_len", "100"]
    line = [sys.executable, "-m", "trtllm_replayssm", *words, "--end_id", "-1", "--device", "cpu"]
    # A shell in the background hands down an ignored SIGINT; the command must see what a terminal sends.
    return subprocess.Popen(
        [*line, "--output_file", str(result)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("end", ["rank", "keyboard"])
def test_ending_a_rank_or_the_command_in_the_middle_of_the_work(
    engines: tuple[Path, Path], tmp_path: Path, end: str
) -> None:
    """One sentence, nothing written, nobody left."""
    process = start_long_work(engines[1], tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    ranks = wait_for_ranks(process.pid)
    time.sleep(1)
    if end == "rank":
        os.kill(ranks[0], signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (1 if end == "rank" else 130)
    assert out == ""
    sentence = "was ended by SIGKILL; all ranks were stopped" if end == "rank" else "error: interrupted"
    assert err.splitlines()[-1].endswith(sentence)
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


def test_a_rank_of_torchrun_can_be_ended_while_it_waits_for_another(engines: tuple[Path, Path]) -> None:
    """Inside a library, where no handler of Python's runs: its peer never comes."""
    port = free_port()
    meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ["generate", "--engine_dir", str(engines[1]), "--input_text", "Hello", "--device", "cpu"]
    line = [sys.executable, "-m", "trtllm_replayssm", *words]
    with subprocess.Popen(line, env=os.environ | meeting, stderr=subprocess.PIPE, text=True) as rank:
        try:
            wait_for_listener(rank, port)
            rank.terminate()
            said = rank.communicate(timeout=60)[1]
        finally:
            rank.kill()
    assert said.splitlines() == ["error: rank 0 was ended by SIGTERM while it waited for another rank"]
    assert rank.returncode == 128 + signal.SIGTERM


def wait_for_listener(process: subprocess.Popen[str], port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("the rank did not start")


def wait_for_ranks(parent: int) -> list[int]:
    """Process ids of the two ranks that ``parent`` starts, once they leave the keyboard to it."""
    for _ in range(600):
        ranks = [rank.pid for rank in with_command(psutil.Process(parent).children(), "spawn_main")]
        if len(ranks) == 2 and all(map(ignores_interrupts, ranks)):
            return ranks
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def ignores_interrupts(pid: int) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_engine_config_says_how_many_ranks(engines: tuple[Path, Path]) -> None:
    data = json.loads((engines[1] / "config.json").read_text())
    assert data["pretrained_config"]["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert len(data["replayssm"]["rank_bytes"]) == 2
