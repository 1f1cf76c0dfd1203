"""The engines of one tiny model: the one that is checked, and those that it is held against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.demo.catalogue import SPECIAL_TOKENS
from trtllm_replayssm.demo.runs import Meter, Run, greedy
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.validation.catalogue import MODELS
from trtllm_replayssm.validation.models import make_checkpoint

WINDOW, DRAFTS = 16, 3
#: With the drafts behind them, positions whose caches TensorRT can bind.
MAX_SEQ_LEN = 253
#: Tokens of the prompts; the last is for a request that comes in between.
PROMPTS = (37, 9, 21)


@dataclass(frozen=True)
class Settings:
    """flavour: of the engines under test. dtype: of the models. steps: decode steps of every run, more than a window.

    device: of the engines under test, None for the GPU where there is one.
    """

    flavour: str
    dtype: str = "float32"
    steps: int = 48
    device: str | None = None


@dataclass(frozen=True)
class Subject:
    """One tiny model. model: of transformers, None without one. folder: where checkpoint and engines lie."""

    family: str
    settings: Settings
    folder: Path
    model: Any

    @classmethod
    def create(cls, family: str, settings: Settings, folder: Path) -> Subject:
        """Makes the checkpoint in an empty folder."""
        return cls(family, settings, folder, make_checkpoint(MODELS[family], folder, settings.dtype))

    # ---- engines -----------------------------------------------------------------------------------------------------

    def engine(self, name: str, flavour: str | None = None, **options: Any) -> Path:
        """Builds an engine folder of that name. options: of BuildOptions, instead of the usual."""
        usual: dict[str, Any] = {
            "max_batch_size": len(PROMPTS) - 1,
            "max_seq_len": MAX_SEQ_LEN,
            "max_num_tokens": 256,
            "replay_window": WINDOW,
            "max_draft_len": DRAFTS,
            "engine_flavour": flavour or self.settings.flavour,
        }
        build_engine(self.folder / "checkpoint", self.folder / name, BuildOptions(**usual | options))
        return self.folder / name

    @cached_property
    def llm(self) -> LLM:
        """The engine under test."""
        return LLM(self.engine("engine"), device=self.settings.device)

    @property
    def session(self) -> Session:
        return self.llm.session

    @cached_property
    def reference(self) -> Session:
        """The embedded engine on the CPU, with plugin layers in plain torch."""
        return LLM(self.engine("reference", "embedded"), device="cpu", plugin_impl="reference").session

    @cached_property
    def ordinary(self) -> Session:
        """An engine that rewrites its state for every token."""
        # As many cache positions as the others, without drafts.
        folder = self.engine("ordinary", replay_window=1, max_draft_len=0, max_seq_len=MAX_SEQ_LEN + DRAFTS)
        return LLM(folder, device=self.settings.device).session

    # ---- what is run -------------------------------------------------------------------------------------------------

    @cached_property
    def token_ids(self) -> list[Tensor]:
        generator, first = torch.Generator().manual_seed(1), len(SPECIAL_TOKENS)
        # The 256 bytes; the ids behind them are padding.
        return [torch.randint(first, first + 256, (n,), generator=generator) for n in PROMPTS]

    @property
    def prompts(self) -> list[Tensor]:
        return self.token_ids[:-1]

    @property
    def intruder(self) -> Tensor:
        return self.token_ids[-1]

    @cached_property
    def meter(self) -> Meter:
        return Meter(self.session)

    @cached_property
    def plain(self) -> Run:
        """The run that all others are held against: greedy, one token a step."""
        return greedy(self.session, self.meter, self.prompts, self.settings.steps)
