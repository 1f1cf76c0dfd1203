"""Feeds the same tokens to sessions, one by one, and keeps what each step says of the token that truly comes next.

On a GPU a token is one CUDA graph in which everything happens on the device: it takes its tokens from the text, runs the
session's own step, keeps the logits, and commits. The host launches and waits for nothing, so that several sessions, each on a
stream of its own, fill a device of which a small model's step leaves most idle. Elsewhere a token is a call of ``Session.step``
and one of ``Session.commit``; both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.deferred import resolved
from trtllm_replayssm.plugins.cursors import Cursor
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.graphs import StepGraphs, StepShape
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.steps import PackedSteps

#: Positions whose logits are scored together: a step of a small model is short, and every launch between two counts.
SCORED = 256
#: Threads that compile kernels.
COMPILERS = 8


@dataclass(frozen=True)
class Forced:
    """On the host. bits: information of the true next tokens, float32 ``[rows, n - 1]``; best: the most probable ones, int64
    ``[rows, n - 1]``. rewrites: state rewrites of all rows."""

    bits: Tensor
    best: Tensor
    rewrites: int


class Run:
    """One session that reads tokens ``[rows, n]``, a row a slot, through its steps."""

    def __init__(self, session: Session, tokens: Tensor) -> None:
        self.session, self.rows, self.end = session, len(tokens), tokens.shape[1] - 1
        device = session.engine.device
        self.columns = tokens.to(device).T.contiguous()
        self.bits = torch.empty(self.end, self.rows, device=device)
        self.best = torch.empty(self.end, self.rows, dtype=torch.int64, device=device)
        self.admit()

    def admit(self) -> None:
        for slot in range(self.rows):
            self.session.admit(slot)

    def feed(self, first: int, stop: int) -> None:
        """Steps of the tokens at positions ``[first, stop)``, SCORED at most."""
        logits = []
        for position in range(first, stop):
            logits.append(self.session.step(self.columns[position][:, None])[:, 0])
            self.session.commit(0, [1] * self.rows)
        self.score(first, torch.stack(logits))

    def score(self, first: int, logits: Tensor) -> None:
        """logits: float32 ``[positions, rows, vocab]`` from position ``first`` on."""
        here, true = slice(first, first + len(logits)), self.columns[first + 1 : first + 1 + len(logits), :, None]
        self.bits[here] = -logits.log_softmax(-1).gather(-1, true.long())[..., 0] / math.log(2)
        self.best[here] = logits.argmax(-1)

    def found(self) -> Forced:
        return Forced(self.bits.cpu().T, self.best.cpu().T, self.rewrites())

    def rewrites(self) -> int:
        return self.session.rewrites


class GraphRun(Run):
    """The same on a GPU, a graph a token; of the session only the pools and cursors on the device follow."""

    def __init__(self, session: Session, tokens: Tensor, steps: PackedSteps, stream: torch.cuda.Stream) -> None:
        super().__init__(session, tokens)
        self.steps, self.stream, device = steps, stream, session.engine.device
        #: The position that the next step reads.
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.empty(SCORED, self.rows, session.engine.decoder.vocab_size, device=device)
        graphs = StepGraphs(device, stream)
        self.graphs = [graphs.get(shape, self.token) for shape in self.shapes()]
        for shape, captured in graphs.captured.items():
            shape.inputs(captured.inputs)[1].copy_(torch.arange(self.rows))
        # The runs before the captures have moved both.
        self.position.zero_()
        self.admit()
        stream.wait_stream(torch.cuda.current_stream(device))

    def shapes(self) -> list[StepShape]:
        """Of each position's step, as a session chooses it."""
        return [self.steps.shape_for(self.rows, self.rows, 1, position + 1, False) for position in range(self.end)]

    def token(self, shape: StepShape, inputs: Tensor) -> tuple[Any, Any]:
        """One token of every row."""
        shape.inputs(inputs)[0].copy_(self.columns.index_select(0, self.position).T)
        hidden, logits = self.steps.forward(shape, inputs)
        self.logits.index_copy_(0, self.position % SCORED, resolved(logits).float().view(1, self.rows, -1))
        self.session.cursors[: self.rows, Cursor.COMMITTED] += 1
        self.position += 1
        return hidden, logits

    def feed(self, first: int, stop: int) -> None:
        with torch.cuda.stream(self.stream):
            for position in range(first, stop):
                self.graphs[position].graph.replay()
            self.score(first, self.logits[: stop - first])

    def found(self) -> Forced:
        self.stream.synchronize()
        return super().found()

    def rewrites(self) -> int:
        """Steps of one token fold whole windows and nothing else."""
        folded = self.session.cursors[: self.rows, Cursor.FOLDED]
        return int((folded // self.session.replay.window).sum())


@torch.no_grad()
def prepared(session: Session, tokens: Tensor, stream: torch.cuda.Stream | None) -> Run:
    """The run of a session that reads ``tokens``; as graphs on ``stream`` where the session's steps are graphs."""
    steps = session.steps
    if stream is not None and isinstance(steps, PackedSteps) and steps.graphs is not None:
        return GraphRun(session, tokens, steps, stream)
    return Run(session, tokens)


@torch.no_grad()
def feed_all(runs: Sequence[Run]) -> None:
    """Every run to its end, side by side; all read tokens of one length."""
    end = runs[0].end if runs else 0
    for first in range(0, end, SCORED):
        for run in runs:
            run.feed(first, min(first + SCORED, end))


def compile_kernels(engines: Sequence[Engine]) -> None:
    """Compile what steps of these engines launch, side by side. What fails here fails again when it is run."""

    def step(engine: Engine) -> None:
        with suppress(UserError, RuntimeError):
            Session(engine, cuda_graphs=False).step([[0]] * engine.config.max_batch_size)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(step, engines))
