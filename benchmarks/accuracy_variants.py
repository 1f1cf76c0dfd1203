"""The ways to keep a recurrent state whose accuracy is compared.

Most are options of an engine. 4-bit states as the only copy, and 8-bit ones of delta-rule layers, are emulated around the
engine's own recurrence, whichever computes it: the state in memory stays float32 and holds only values of the format.
Emulated variants say what a format loses; they have no kernel, and no speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy_formats import FORMATS
from trtllm_replayssm.bench.decode import with_replay
from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.implementation import Implementation
from trtllm_replayssm.replay import QUANTISED_STATES, ReadDtype, ReplayConfig
from trtllm_replayssm.runtime.engine import Engine

Layer = Callable[..., Tensor]
Quantise = Callable[[Tensor], Tensor]

#: What every other variant is held against: the state in float32, rewritten at every token.
BASELINE = "float32, standard"
#: Window of variants that are not tried at all of them.
USUAL_WINDOW = 16
READ_DTYPES: tuple[ReadDtype, ...] = ("nvfp4", "fp8")
#: Names of variants that differ in dtype and window of the state only: the dtype, the window if there is one, how it rounds.
WINDOWED = re.compile(r"(\w+), (?:standard|window (\d+))(, rounded at random)?")


@dataclass(frozen=True)
class Variant:
    """replay: options of the engine. emulated: how the recurrent layers are changed; None for a real engine."""

    name: str
    replay: ReplayConfig
    emulated: Callable[[Layer], Layer] | None = None

    def engine(self, engine: Engine, rows: int) -> Engine:
        """The engine with these options and ``rows`` slots."""
        changed = with_replay(engine, self.replay, rows, 1)
        return changed if self.emulated is None else replace(changed, plugins=wrapped(engine.plugins, self.emulated))


def usual(name: str) -> bool:
    """Whether the variant of this name has no window, or the usual one."""
    windowed = WINDOWED.fullmatch(name)
    return windowed is None or windowed[2] in (None, str(USUAL_WINDOW))


def wrapped(plugins: Implementation, around: Callable[[Layer], Layer]) -> Implementation:
    return replace(
        plugins,
        mamba2=around(plugins.mamba2),
        gated_delta=around(plugins.gated_delta),
        kda=around(plugins.kda),
    )


def chosen(checkpoint: CheckpointConfig, windows: Sequence[int], words: Sequence[str]) -> list[Variant]:
    """The baseline, and the variants whose names have one of the words, in the words' order; without words, all.

    Raises UserError for a word that no name has.
    """
    baseline, *others = variants(checkpoint, windows)
    found = {word: [variant for variant in others if word in variant.name] for word in words or [""]}
    for word, named in found.items():
        if not named:
            raise UserError(
                f"no variant has {word!r} in its name", f"the names are {'; '.join(v.name for v in others)}"
            )
    return [baseline, *dict.fromkeys(variant for named in found.values() for variant in named)]


def variants(checkpoint: CheckpointConfig, windows: Sequence[int]) -> Iterator[Variant]:
    """All that suit the model's layers: the baseline, then the others by what they say about, in case time runs out."""
    plain = replace(
        checkpoint.replay,
        window=1,
        max_draft_len=0,
        state_dtype="float32",
        fold="exact",
        ring_dtype="auto",
        state_read_dtype="same",
        state_rounding="nearest",
    )
    usual = replace(plain, window=USUAL_WINDOW)
    yield Variant(BASELINE, plain)
    if USUAL_WINDOW in windows:
        yield Variant(f"float32, window {USUAL_WINDOW}", usual)
    yield from read_copies(checkpoint, usual)
    yield from single_copies(checkpoint, usual, f"window {USUAL_WINDOW}")
    yield from narrow(checkpoint, usual, f"window {USUAL_WINDOW}")
    yield from narrow(checkpoint, plain, "standard")
    yield from single_copies(checkpoint, plain, "standard")
    if any(isinstance(layer, GatedDelta | Kda) for _, layer in checkpoint.decoder.named_parts()):
        for ring in ("float32", "float16", "bfloat16"):
            derived = replace(usual, fold="derived", ring_dtype=ring)
            yield Variant(f"float32, window {USUAL_WINDOW}, derived fold of {ring} updates", derived)
    for window in windows:
        if window != USUAL_WINDOW:
            other = replace(plain, window=window)
            yield Variant(f"float32, window {window}", other)
            yield from narrow(checkpoint, other, f"window {window}")


def read_copies(checkpoint: CheckpointConfig, replay: ReplayConfig) -> Iterator[Variant]:
    """An exact checkpoint, and outputs that come from a narrow copy of it."""
    for read_dtype in READ_DTYPES:
        copied = replace(replay, state_read_dtype=read_dtype)
        if suits(checkpoint, copied):
            yield Variant(f"{read_dtype} read copy, window {replay.window}", copied)


def single_copies(checkpoint: CheckpointConfig, replay: ReplayConfig, when: str) -> Iterator[Variant]:
    """The state itself in a narrow format: the engine's, where an ordinary engine has it for these layers, or emulated."""
    for name, quantise in FORMATS.items():
        quantised = replace(replay, state_dtype=name) if name in QUANTISED_STATES else replay
        if quantised.quantised_state and suits(checkpoint, quantised):
            yield Variant(f"{name} single copy, {when}", quantised)
        else:
            yield Variant(f"{name} single copy, {when}", replay, single_copy(quantise))


def narrow(checkpoint: CheckpointConfig, replay: ReplayConfig, when: str) -> Iterator[Variant]:
    """16-bit states, rounded to the nearest, and at random where layers can."""
    for dtype in ("bfloat16", "float16"):
        typed = replace(replay, state_dtype=dtype)
        yield Variant(f"{dtype}, {when}", typed)
        at_random = replace(typed, state_rounding="stochastic")
        if suits(checkpoint, at_random):
            yield Variant(f"{dtype}, {when}, rounded at random", at_random)


def suits(checkpoint: CheckpointConfig, replay: ReplayConfig) -> bool:
    """Whether the model's layers can have these options."""
    try:
        replace(checkpoint, replay=replay).check_replay()
    except UserError:
        return False
    return True


def single_copy(quantise: Quantise) -> Callable[[Layer], Layer]:
    """The state itself is quantised whenever it is written, so that rounding feeds back."""

    def around(inner: Layer) -> Layer:
        def layer(*arguments: Any) -> Tensor:
            *_, step, pools = arguments
            outputs, state = inner(*arguments), pools["state"]
            state.copy_(torch.where(written(step, state), quantise(state), state))
            return outputs

        return layer

    return around


def written(step: Tensor, state: Tensor) -> Tensor:
    """Which slots' states ``[slots, ...]`` a step of info ``[rows, STEP_WORDS]`` rewrites, as a mask that broadcasts."""
    slots, folds = step[:, Step.SLOT].long(), step[:, Step.FOLD_TO] > step[:, Step.FOLDED]
    # Padding rows mark a place behind the last slot.
    marks = torch.zeros(len(state) + 1, dtype=torch.bool, device=state.device)
    marks.scatter_(0, torch.where(slots < 0, len(state), slots), folds)
    return marks[:-1].view(-1, *([1] * (state.ndim - 1)))
