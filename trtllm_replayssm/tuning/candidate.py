"""What can be chosen for recurrent layers, and the memory that each choice takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.replay import ReadDtype, ReplayConfig
from trtllm_replayssm.tuning.subject import LayerGroup

WINDOWS = (4, 8, 12, 16, 24, 32, 64)
READ_DTYPES: tuple[ReadDtype, ...] = ("same", "fp8", "nvfp4")


@dataclass(frozen=True)
class Candidate:
    """Values of build's --replay_window, --state_dtype and --state_read_dtype."""

    window: int
    state_dtype: str
    read_dtype: ReadDtype

    def replay(self, stored: ReplayConfig, draft_len: int) -> ReplayConfig:
        """The stored options with this choice. Raises UserError when they do not fit together."""
        return replace(
            stored,
            window=self.window,
            max_draft_len=draft_len,
            state_dtype=self.state_dtype,
            state_read_dtype=self.read_dtype,
        )

    def __str__(self) -> str:
        reads = "" if self.read_dtype == "same" else f" read as {self.read_dtype}"
        return f"window {self.window}, {self.state_dtype}{reads}"


@dataclass(frozen=True)
class SlotBytes:
    """Memory of one request on one rank in all recurrent layers, without the convolution's, which no choice changes."""

    checkpoint: int
    copy: int
    ring: int

    @property
    def total(self) -> int:
        return self.checkpoint + self.copy + self.ring

    @classmethod
    def of(cls, groups: Sequence[LayerGroup], checkpoint: CheckpointConfig, replay: ReplayConfig) -> SlotBytes:
        """As the pools are allocated, padding included. Raises UserError for a choice that the layers cannot have."""
        size = {"state": 0, "copy": 0, "ring": 0}
        options = StateOptions(replay, checkpoint.torch_dtype, max_seq_len=0)
        for group in groups:
            for pool in group.layer.pools(options).values():
                if pool.kind in size:
                    size[pool.kind] += group.count * pool.slot_bytes
        return cls(size["state"], size["copy"], size["ring"])


def candidates(
    windows: Sequence[int], state_dtypes: Sequence[str], read_dtypes: Sequence[ReadDtype]
) -> Iterator[Candidate]:
    """Every combination, without repetitions."""
    yield from dict.fromkeys(
        Candidate(window, state, read) for state in state_dtypes for read in read_dtypes for window in windows
    )
