"""Decode steps by batch size: an ordinary engine, ReplaySSM, and ReplaySSM with speculation, over the same weights.

A step is what serving does: the step runs, the chosen tokens come back, the cursors move. The next step takes its tokens from
the device, and the host reads those of a step while the one behind it runs. Slots stand at different places of their window,
as they do in service, and the steps cover whole windows, so that state rewrites weigh what they weigh in a long run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch

from trtllm_replayssm.bench.measures import Percentiles, milliseconds
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.readback import Arriving
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.slot_state import SlotCursors

#: Steps that run before the clock starts: kernels are compiled, graphs captured, clocks raised.
WARM_STEPS = 3
#: Steps after which the tokens' random part repeats itself.
NOISE = 32


@dataclass(frozen=True)
class Mode:
    """One way to decode. tokens: of a verify step; accepted: how many of them are kept."""

    name: str
    replay: ReplayConfig
    tokens: int = 1
    accepted: int = 1


@dataclass(frozen=True)
class DecodeTiming:
    """tokens_per_second: of all requests. step_ms: of one step. slot_bytes: state and caches of one request."""

    mode: str
    batch_size: int
    context_len: int
    steps: int
    tokens_per_second: float
    step_ms: Percentiles
    slot_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def modes(replay: ReplayConfig, draft_len: int = 3, accepted: int = 3) -> tuple[Mode, ...]:
    """Standard (the state is read and rewritten for every token), ReplaySSM, and verify steps of ``draft_len`` drafts.

    Raises UserError when a step cannot keep ``accepted`` tokens, or the window not hold it.
    """
    if not 1 <= accepted <= draft_len + 1:
        raise UserError(f"a step of {draft_len} drafts cannot keep {accepted} tokens", f"use 1 to {draft_len + 1}")
    window = replay.window if replay.window > 1 else ReplayConfig().window
    return (
        Mode("standard", replace(replay, window=1, max_draft_len=0, state_read_dtype="same")),
        Mode("replayssm", replace(replay, window=window, max_draft_len=0)),
        Mode("speculative", replace(replay, window=window, max_draft_len=draft_len), draft_len + 1, accepted),
    )


def with_replay(engine: Engine, replay: ReplayConfig, batch_size: int, tokens: int) -> Engine:
    """The engine with other options of ReplaySSM and another batch size; weights do not depend on them.

    Raises UserError for a plan, which does.
    """
    config = engine.config
    if config.engine_flavour == "tensorrt":
        raise UserError(
            "a TensorRT plan has one window and one batch size, so its modes cannot be compared",
            "measure requests, or build the engine with --engine_flavour embedded",
        )
    checkpoint = replace(config.checkpoint, replay=replay)
    steps = max(config.max_num_tokens, batch_size * tokens)
    return replace(
        engine,
        config=replace(config, checkpoint=checkpoint, max_batch_size=batch_size, max_num_tokens=steps),
    )


def decode_timings(
    engine: Engine, batch_sizes: Sequence[int], context_len: int, chosen: Sequence[Mode], steps: int = 64
) -> Iterator[DecodeTiming]:
    """Each mode at each batch size. context_len: tokens that every request holds at first. steps: at least so many.

    Raises UserError for sizes that make no sense, EngineError where the device has not enough memory.
    """
    for name, values in (("batch_sizes", batch_sizes), ("context_len", [context_len]), ("steps", [steps])):
        if min(values, default=1) < 1:
            raise UserError(f"{name} is {min(values)}; it must be 1 or more")
    for batch_size in batch_sizes:
        for mode in chosen:
            session = Session(with_replay(engine, mode.replay, batch_size, mode.tokens))
            yield decode_timing(session, mode, context_len, steps)
            # The pools must be free before those of the next mode are allocated, and not kept in pieces of their sizes.
            del session
            release(engine.device)


def decode_timing(session: Session, mode: Mode, context_len: int, steps: int) -> DecodeTiming:
    """Times whole windows of steps of every slot. Raises UserError when they do not fit the engine's max_seq_len."""
    cycle = max(1, mode.replay.window // mode.accepted)
    steps = -(-steps // cycle) * cycle
    step = prepared_step(session, mode, context_len, steps)
    times = []
    synchronise(session)
    start = last = time.perf_counter()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    synchronise(session)
    seconds = time.perf_counter() - start
    spread = milliseconds(times)
    assert spread is not None
    rate, slot_bytes = session.max_batch_size * steps * mode.accepted / seconds, session.engine.config.slot_bytes()
    return DecodeTiming(mode.name, session.max_batch_size, context_len, steps, rate, spread, slot_bytes)


def prepared_step(session: Session, mode: Mode, context_len: int, steps: int) -> Callable[[], None]:
    """A function that runs one step of every slot, reads its tokens back, and commits as many as the mode keeps.

    It has run WARM_STEPS times, and every slot held ``context_len`` tokens and 0 to ``window - 1`` in its ring before that.
    Raises UserError when ``steps`` more do not fit the engine's max_seq_len.
    """
    window, rows = mode.replay.window, session.max_batch_size
    longest = context_len + window + (WARM_STEPS + steps) * mode.accepted + mode.tokens
    if longest > session.engine.config.max_seq_len:
        raise UserError(
            f"{steps} steps after {context_len} tokens need room for {longest}, and max_seq_len is"
            f" {session.engine.config.max_seq_len}",
            "build the engine with a larger --max_seq_len",
        )
    for slot in range(rows):
        waiting = slot % window
        session.place(slot, SlotCursors(context_len + waiting, context_len, context_len + waiting))
    vocab, accepted, turn = session.engine.decoder.vocab_size, [mode.accepted] * rows, count(1)
    # A model with random weights soon says the same in every row, and rows that read the same choose the same experts: a
    # batch of a server reads many more of them.
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(vocab, (NOISE, rows, mode.tokens), generator=random).to(session.engine.device)
    tokens = noise[0].int()
    arriving = Arriving(tokens)

    def step() -> None:
        nonlocal arriving
        chosen = session.step(tokens).argmax(-1)
        before, arriving = arriving, Arriving(chosen)
        before.get()
        tokens.copy_((chosen + noise[next(turn) % NOISE]) % vocab)
        session.commit(0, accepted)

    for _ in range(WARM_STEPS):
        step()
    return step


def synchronise(session: Session) -> None:
    if session.engine.device.type == "cuda":
        torch.cuda.synchronize(session.engine.device)


def release(device: torch.device) -> None:
    """Give the memory of sessions that are gone, and of their graphs, back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
