"""The kernels of this project as subjects of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.problem import ACTIVATION, DEVICE, Problem
from benchmarks.subject import Ringed, only_for
from trtllm_replayssm.plugins.cursors import STEP_WORDS, RowMode
from trtllm_replayssm.plugins.implementation import implementation
from trtllm_replayssm.plugins.reference.read_copy import write_copy
from trtllm_replayssm.replay import ReadDtype
from trtllm_replayssm.tuning.layer import FOLDED, Dtypes, plausible_pools, step_info


class Replay(Ringed):
    """The plugin layer with its ring; with the window 1 of ``Case.standard`` the ordinary recurrence."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        plugins = implementation("auto", torch.device(DEVICE))
        self.run: Any = getattr(plugins, self.case.kind)
        self.attributes: Any = self.case.attributes
        self.step_info = torch.zeros(self.case.batch, STEP_WORDS, dtype=torch.int32, device=DEVICE)
        self.folded = FOLDED
        self.pools = [self.allocate(problem) for problem in problems]
        self.place([0])

    def allocate(self, problem: Problem) -> dict[str, Tensor]:
        """Pools with plausible rings, which nobody but a timed step finds."""
        dtypes = Dtypes(ACTIVATION, self.case.state, ACTIVATION)
        pools = plausible_pools(self.attributes, dtypes, self.case.batch, DEVICE)
        pools["state"].copy_(problem.state)
        write_copy(pools, torch.arange(self.case.batch, device=DEVICE))
        return pools

    def step(self, layer: int, i: int) -> Tensor:
        problem = self.problems[layer]
        inputs = (x[i] for x in problem.inputs)
        return self.run(self.attributes, *inputs, *problem.weights, self.step_info, self.pools[layer])

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        case, mode = self.case, RowMode.ABSORB if self.case.prefills else RowMode.DECODE
        info = step_info(case.window, histories, case.tokens, case.batch, DEVICE, self.folded, mode)
        self.step_info.copy_(info)

    def commit(self, accepted: int) -> None:
        history, folds = self.histories[0], self.case.folds(self.histories[0])
        if folds:
            self.folded += history + (accepted if self.case.absorbs else 0)
        self.place([0 if folds and self.case.absorbs else accepted if folds else history + accepted])


class Standard(Replay):
    """The ordinary recurrence by the same kernels: window 1, so that the state is read and written at every token."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        only_for(problems[0].case.tokens == 1)
        super().__init__([Problem(p.case.standard, p.inputs, p.weights, p.state) for p in problems])

    def bytes(self) -> float:
        return self.case.standard_bytes()


class CopyReads(Replay):
    """The plugin layer with a read copy (plugins/read_copy.py): its outputs are held against a reference that has one, too."""

    read_dtype: ReadDtype

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__([replace(p, case=self.held_against(p.case)) for p in problems])

    @classmethod
    def held_against(cls, case: Case) -> Case:
        return replace(case, read_dtype=cls.read_dtype)


class Fp8Reads(CopyReads):
    read_dtype = "fp8"


class Nvfp4Reads(CopyReads):
    read_dtype = "nvfp4"
