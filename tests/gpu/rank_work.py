"""What the ranks of tests run in processes of their own, which import it by this name."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.session import Session


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
