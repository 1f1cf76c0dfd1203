"""Training steps, one CUDA graph a step on a GPU, and the bits per byte of a held-out text.

A step of these models is hundreds of small kernels, so that launching them one by one would take longer than running them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from chunked_forms import chunked_forms
from torch import Tensor, nn
from torch.nn import functional as F

log = logging.getLogger(__name__)

#: No padding anywhere: attention is causal, and recurrent layers see every token.
MASKS = {"full_attention": None, "linear_attention": None}
#: Steps that run before the graph is captured, and count like all others.
EAGER_STEPS = 3
#: Share of the run in which the learning rate rises; it falls evenly to 0 from there.
RISE = 0.04
#: Largest norm of all gradients together.
GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class Plan:
    """steps: of the run, unless ``seconds`` are over before. batch_bytes: bytes of a step. contexts: bytes of a text with the
    share of the run from which on texts are so long."""

    steps: int
    seconds: float
    batch_bytes: int
    contexts: tuple[tuple[float, int], ...]
    learning_rate: float
    seed: int

    def context(self, progress: float) -> int:
        return [length for start, length in self.contexts if progress >= start][-1]

    def rate(self, progress: float) -> float:
        return self.learning_rate * min(progress / RISE, (1 - progress) / (1 - RISE), 1.0)


class Step:
    """One training step over texts of one length.

    tokens: int64 ``[batch, context + 1]``, filled before ``run``. loss: float32, in nats a byte, of the last step.
    """

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, batch: int, context: int) -> None:
        self.model, self.optimiser = model, optimiser
        self.device = next(model.parameters()).device
        self.tokens = torch.zeros(batch, context + 1, dtype=torch.long, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0
        # Steps before a capture must run on another stream than the default one.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def run(self) -> None:
        if self.graph is None and self.stream is not None and self.done == EAGER_STEPS:
            self.capture()
        if self.graph is not None:
            self.graph.replay()
        elif self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.compute()
            torch.cuda.current_stream().wait_stream(self.stream)
        else:
            self.compute()
        self.done += 1

    def compute(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        # Without its cache: weights change from step to step, and a graph would keep the casts of the first.
        on_gpu = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            logits = logits_of(self.model, self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimiser.step()
        self.loss.copy_(loss.detach())

    def capture(self) -> None:
        """Record the step; a driver that cannot do so leaves steps as they are."""
        graph = torch.cuda.CUDAGraph()
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with torch.cuda.graph(graph):
                self.compute()
        except RuntimeError as error:
            log.warning("steps run without a CUDA graph, which is slower: %s", str(error).partition("\n")[0])
        else:
            self.graph = graph


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=MASKS, use_cache=False).logits


def optimiser_of(model: nn.Module, rate: Tensor) -> torch.optim.Optimizer:
    """AdamW whose learning rate is read on the device; decay for matrices only."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    on_gpu = rate.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)


def train(model: nn.Module, text: Tensor, plan: Plan) -> Iterator[tuple[int, float, float]]:
    """Train in place on token ids ``[n]`` on the model's device; yields step, progress from 0 to 1, and loss in bits a byte.

    Progress is that of steps or of seconds, whichever is further on, so that the learning rate has fallen to 0 when time is
    over. Losses are read, and reported, now and then, and that of the last step.
    """
    device, random = text.device, torch.Generator().manual_seed(plan.seed)
    rate = torch.zeros((), device=device)
    optimiser = optimiser_of(model, rate)
    every, context, start = max(1, plan.steps // 40), 0, time.monotonic()
    model.train()
    with chunked_forms(model):
        for number in range(plan.steps):
            elapsed = time.monotonic() - start
            progress = min(max(number / plan.steps, elapsed / plan.seconds), 1.0)
            last = number == plan.steps - 1 or elapsed >= plan.seconds
            if plan.context(progress) != context:
                context = plan.context(progress)
                batch = max(1, plan.batch_bytes // context)
                step = Step(model, optimiser, batch, context)
            starts = torch.randint(len(text) - context, (batch, 1), generator=random).to(device)
            step.tokens.copy_(text[starts + torch.arange(context + 1, device=device)])
            rate.fill_(plan.rate(progress))
            step.run()
            if last or number % every == 0:
                # Reading the loss waits for the device; without it, seconds would be those of launching.
                yield number, progress, step.loss.item() / math.log(2)
            if last:
                break


@torch.no_grad()
def bits_per_byte(model: nn.Module, tokens: Sequence[int], context: int, batch_bytes: int) -> float:
    """Mean bits of every token behind the first of each piece of ``context`` tokens, computed in float32."""
    device = next(model.parameters()).device
    pieces = torch.tensor(tokens[: len(tokens) // context * context], device=device).view(-1, context)
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    model.eval()
    with chunked_forms(model):
        for piece in pieces.split(max(1, batch_bytes // context)):
            logits = logits_of(model, piece[:, :-1]).float()
            total += F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum")
            count += piece[:, 1:].numel()
    return total.item() / count / math.log(2)
