"""Different ways to bring the same requests through a session: plainly, with drafts, interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import STEP_WORDS, Cursor, Step
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.traffic import RecurrentBytes

Prompts = Sequence[Tensor]


@dataclass
class Meter:
    """Watches decode steps of a session from outside: cursors before and after, and whether checkpoints changed.

    moved: bytes of recurrent state and ring that the steps read and wrote, by their cursors. steps: of one request each.
    rewrites: of those, how many changed a byte of a checkpoint. unexplained: steps whose checkpoints changed though the
    cursors say that nothing was folded, or the reverse.
    """

    session: Session
    moved: int = 0
    steps: int = 0
    rewrites: int = 0
    unexplained: int = 0
    size: RecurrentBytes = field(init=False)

    def __post_init__(self) -> None:
        self.size = RecurrentBytes.of(self.session.layout.values(), self.session.replay)

    def step(self, token_ids: Tensor, query_lens: Tensor | None = None, active: Tensor | None = None) -> Tensor:
        """``Session.step`` from slot 0, watched; logits ``[rows, T, vocab]`` on the host."""
        rows, tokens = token_ids.shape
        session = self.session
        states = [pool for name, pool in session.pools.items() if session.layout[name].kind == "state"]
        cursors, checkpoints = session.cursors[:rows].clone(), [pool[:rows].clone() for pool in states]
        logits = session.step(token_ids, query_lens=query_lens, active=active)
        plan = torch.zeros(rows, STEP_WORDS, dtype=torch.int32)
        plan[:, Step.SLOT] = torch.arange(rows) if active is None else torch.where(active, torch.arange(rows), -1)
        plan[:, Step.COMMITTED] = cursors[:, Cursor.COMMITTED].cpu()
        plan[:, Step.FOLDED] = cursors[:, Cursor.FOLDED].cpu()
        plan[:, Step.FOLD_TO] = session.cursors[:rows, Cursor.FOLDED].cpu()
        plan[:, Step.QUERY_LEN] = tokens if query_lens is None else query_lens
        live = plan[:, Step.SLOT] >= 0
        changed = torch.stack([(a != b[:rows]).flatten(1).any(1) for a, b in zip(checkpoints, states)]).any(0).cpu()
        folds = plan[:, Step.FOLD_TO] > plan[:, Step.FOLDED]
        self.moved += self.size.moved(plan)
        self.steps += int(live.sum())
        self.rewrites += int((changed & live).sum())
        self.unexplained += int((changed != (folds & live)).sum())
        return logits.cpu()


@dataclass(frozen=True)
class Run:
    """tokens: int ``[rows, steps]`` in the order fed. logits: ``[rows, steps + 1, vocab]``; entry i chose token i."""

    tokens: Tensor
    logits: Tensor


def admitted(session: Session, prompts: Prompts, chunk: int | None = None) -> Tensor:
    """Every prompt in the slot of its index; logits of their last tokens ``[rows, vocab]``, on the host."""
    last = []
    for slot, prompt in enumerate(prompts):
        session.admit(slot)
        last.append(session.prefill(slot, prompt, chunk).cpu())
    return torch.stack(last)


def greedy(session: Session, meter: Meter, prompts: Prompts, steps: int) -> Run:
    """The most probable token at every step, all requests in one batch."""
    checkpoint = session.engine.config.checkpoint
    known = checkpoint.num_tokens or checkpoint.decoder.vocab_size
    logits, tokens = [admitted(session, prompts)], []
    for _ in range(steps):
        tokens.append(logits[-1][:, :known].argmax(-1))
        logits.append(meter.step(tokens[-1][:, None])[:, 0])
        session.commit(0, [1] * len(prompts))
    return Run(torch.stack(tokens, 1), torch.stack(logits, 1))


def forced(session: Session, meter: Meter, prompts: Prompts, tokens: Tensor, chunk: int | None = None) -> Run:
    """Given tokens ``[rows, steps]`` one by one, behind prompts that were prefilled in chunks."""
    logits = [admitted(session, prompts, chunk)]
    for column in tokens.unbind(1):
        logits.append(meter.step(column[:, None])[:, 0])
        session.commit(0, [1] * len(prompts))
    return Run(tokens, torch.stack(logits, 1))


def drafted(session: Session, meter: Meter, prompts: Prompts, tokens: Tensor, seed: int = 0) -> tuple[Run, int, int]:
    """Given tokens through verify steps whose drafts are right up to a random point; the rest is rejected.

    Returns the logits of the tokens that were kept, the number of drafts rejected, and the number offered.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, steps = tokens.shape
    width, vocab = session.replay.verify_tokens, session.engine.decoder.vocab_size
    first = admitted(session, prompts)
    logits = torch.empty(rows, steps + 1, first.shape[-1])
    logits[:, 0] = first
    done, rejected, offered = torch.zeros(rows, dtype=torch.long), 0, 0
    while bool((done < steps).any()):
        lens = (steps - done).clamp(max=width)
        kept = torch.minimum(torch.randint(1, width + 1, (rows,), generator=generator), lens)
        positions = (done[:, None] + torch.arange(width)).clamp(max=steps - 1)
        offers = tokens.gather(1, positions)
        wrong = torch.arange(width) >= kept[:, None]
        offers = torch.where(wrong, (offers + 1) % vocab, offers)
        live = lens > 0
        out = meter.step(offers, lens.clamp(min=1), live)
        for row in live.nonzero()[:, 0].tolist():
            logits[row, done[row] + 1 : done[row] + 1 + kept[row]] = out[row, : kept[row]]
        session.commit(0, kept.int())
        rejected, offered = rejected + int((lens - kept).sum()), offered + int((lens - 1).clamp(min=0).sum())
        done += kept
    return Run(tokens, logits), rejected, offered


def interrupted(session: Session, meter: Meter, prompts: Prompts, tokens: Tensor, intruder: Tensor) -> Run:
    """Like ``forced``, but halfway every request is preempted, its slot used by another, and resumed in another slot."""
    rows, steps = tokens.shape
    logits = [admitted(session, prompts)]
    request_of_slot = torch.arange(rows)
    for i in range(steps):
        if i == steps // 2:
            saved = [session.save(slot) for slot in range(rows)]
            admitted(session, [intruder] * rows)
            request_of_slot = request_of_slot.roll(1)
            for slot, request in enumerate(request_of_slot.tolist()):
                session.restore(slot, saved[request])
        out = meter.step(tokens[request_of_slot, i, None])[:, 0]
        logits.append(out[request_of_slot.argsort()])
        session.commit(0, [1] * rows)
    return Run(tokens, torch.stack(logits, 1))


@torch.no_grad()
def uncached(model: Any, prompts: Prompts, tokens: Tensor) -> Tensor:
    """Logits of a transformers model for the same tokens ``[rows, steps]``, as in Run: one pass a request, without a cache."""
    rows = []
    for prompt, continuation in zip(prompts, tokens):
        logits = model(input_ids=torch.cat([prompt, continuation])[None], use_cache=False).logits[0]
        rows.append(logits[len(prompt) - 1 :].float())
    return torch.stack(rows)
