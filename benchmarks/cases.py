"""What is measured: layers of released models at a batch size, and the bytes that a step of them has to move."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import torch

from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import copy_pools
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReadDtype
from trtllm_replayssm.tuning.layer import Attributes, cycle


@dataclass(frozen=True)
class Mamba2Model:
    heads: int
    head_dim: int
    state_size: int
    groups: int


@dataclass(frozen=True)
class DeltaModel:
    """Heads of ``dim x dim``; ``per_channel`` says that every key channel decays by itself (KDA)."""

    key_heads: int
    value_heads: int
    per_channel: bool = False
    dim: int = 128


#: By kind of layer; on one GPU unless the name says how many ranks (tp) share the heads.
MODELS: dict[str, dict[str, Mamba2Model | DeltaModel]] = {
    "mamba2": {
        "nemotron-3-nano": Mamba2Model(64, 64, 128, 8),
        "nemotron-3-super": Mamba2Model(128, 64, 128, 8),
        "nemotron-3-super-tp8": Mamba2Model(16, 64, 128, 1),
    },
    "gated_delta": {
        "qwen3.5-35b": DeltaModel(16, 32),
        "qwen3.5-122b": DeltaModel(16, 64),
        "qwen3.5-122b-tp8": DeltaModel(2, 8),
    },
    "kda": {
        "kimi-linear": DeltaModel(32, 32, per_channel=True),
        "ling-3-tiny": DeltaModel(16, 16, per_channel=True),
    },
}
#: Bytes of a 16-bit activation; floors are those of 16-bit activations and rings.
WORD = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes of one row: its state, one entry of its ring, activations in and out of one token, and its state's read copy."""

    state: int
    entry: int
    token: int
    copy: int = 0


@dataclass(frozen=True)
class Case:
    """A step of ``tokens`` tokens for ``batch`` rows of one layer; more than MAX_VERIFY_TOKENS make it a prefill."""

    kind: str
    model: str
    batch: int
    tokens: int
    state: torch.dtype
    window: int = 16
    read_dtype: ReadDtype = "same"

    @property
    def shape(self) -> Mamba2Model | DeltaModel:
        return MODELS[self.kind][self.model]

    @property
    def prefills(self) -> bool:
        return self.tokens > MAX_VERIFY_TOKENS

    @property
    def verifies(self) -> bool:
        return 1 < self.tokens <= MAX_VERIFY_TOKENS

    @property
    def standard(self) -> Case:
        """The same layer without a ring: one that folds at every token."""
        return replace(self, window=1)

    @property
    def attributes(self) -> Attributes:
        rows, shape = self.window + (self.tokens if self.verifies else 0), self.shape
        attributes: Attributes
        if isinstance(shape, Mamba2Model):
            attributes = Mamba2Attributes(
                shape.heads, shape.head_dim, shape.state_size, shape.groups, self.window, ring_rows=rows
            )
        elif shape.per_channel:
            attributes = KdaAttributes(shape.value_heads, shape.dim, shape.dim, self.window, rows)
        else:
            heads, dims = (shape.key_heads, shape.value_heads), (shape.dim, shape.dim)
            attributes = GatedDeltaAttributes(*heads, *dims, self.window, rows)
        return replace(attributes, read_dtype=self.read_dtype)

    # ---- cursors -----------------------------------------------------------------------------------------------------

    def cycle(self) -> list[int]:
        """Tokens in the ring before each step of a cycle in which everything is accepted; the last one folds."""
        return [0] if self.prefills else cycle(self.window, self.tokens)

    def folds(self, history: int) -> bool:
        """Whether a step that finds ``history`` tokens in the ring folds (plugins/advance.py)."""
        return self.prefills or (
            history + 1 >= self.window if self.tokens == 1 else history + self.tokens > self.window
        )

    @property
    def absorbs(self) -> bool:
        """Whether a step that folds takes its own tokens up too."""
        return not self.verifies

    # ---- bytes -------------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        size, s = self.state.itemsize, self.shape
        dims = (s.heads, s.head_dim, s.state_size) if isinstance(s, Mamba2Model) else (s.value_heads, s.dim, s.dim)
        copies = copy_pools(self.read_dtype, *dims).values()
        copy = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in copies)
        if isinstance(s, Mamba2Model):
            inner, groups = s.heads * s.head_dim, s.groups * s.state_size
            return Traffic(
                inner * s.state_size * size,
                (inner + groups) * WORD + 4 * s.heads,
                (2 * inner + 2 * groups + s.heads) * WORD,
                copy,
            )
        keys, values, gates = s.key_heads * s.dim, s.value_heads * s.dim, s.dim if s.per_channel else 1
        return Traffic(
            values * s.dim * size,
            (keys + values) * WORD + 4 * s.value_heads * (1 + gates),
            (2 * keys + 2 * values + s.value_heads * (1 + gates)) * WORD,
            copy,
        )

    def step_bytes(self, history: int) -> int:
        """Bytes that a step must move when all rows find ``history`` tokens in the ring."""
        t, folds = self.traffic, self.folds(history)
        appended = 0 if folds and self.absorbs else self.tokens
        # Decode and verify steps read the copy, if there is one; those that fold move both.
        copied = t.copy > 0 and not self.prefills
        state = t.state * (folds + (folds or not copied)) + t.copy * (folds + copied)
        return self.batch * (state + t.entry * (history + appended) + t.token * self.tokens)

    def replay_bytes(self) -> float:
        """Mean over a cycle."""
        return statistics.mean(map(self.step_bytes, self.cycle()))

    def standard_bytes(self) -> float:
        """Of a step that reads and writes the state once."""
        return self.batch * (2 * self.traffic.state + self.tokens * self.traffic.token)

    def snapshot_bytes(self) -> float:
        """Of a verify step that reads the state and writes one after every token."""
        return self.batch * ((1 + self.tokens) * self.traffic.state + self.tokens * self.traffic.token)
