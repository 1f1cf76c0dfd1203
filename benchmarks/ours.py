"""The kernels of this project as subjects of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import BASE
from benchmarks.problem import ACTIVATION, DEVICE, Problem
from benchmarks.subject import Subject, only_for
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.implementation import implementation


class Replay(Subject):
    """The plugin layer with its ring; with the window 1 of ``Case.standard`` the ordinary recurrence."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        plugins = implementation("auto", torch.device(DEVICE))
        self.run: Any = getattr(plugins, self.case.kind)
        self.attributes: Any = self.case.attributes
        self.step_info = torch.zeros(self.case.batch, STEP_WORDS, dtype=torch.int32, device=DEVICE)
        self.folded = BASE
        self.pools = [self.allocate(problem) for problem in problems]
        self.place([0])

    def allocate(self, problem: Problem) -> dict[str, Tensor]:
        """Pools with plausible rings, which nobody but a timed step finds."""
        described = self.attributes.pools(ACTIVATION, self.case.state, ACTIVATION)
        pools = {name: pool.allocate(self.case.batch, DEVICE) for name, pool in described.items()}
        pools["state"].copy_(problem.state)
        for name, low, high in (("ring_dt", 0.01, 0.2), ("ring_g", -0.2, 0.0), ("ring_beta", 0.0, 1.0)):
            if name in pools:
                pools[name].uniform_(low, high)
        for name in {"ring_x", "ring_b", "ring_k", "ring_v"} & pools.keys():
            pools[name].normal_()
        return pools

    def step(self, layer: int, i: int) -> Tensor:
        problem = self.problems[layer]
        inputs = (x[i] for x in problem.inputs)
        return self.run(self.attributes, *inputs, *problem.weights, self.step_info, self.pools[layer])

    def bytes(self) -> float:
        return self.case.replay_bytes()

    def cycle(self) -> list[int]:
        return self.case.cycle()

    def place(self, histories: Sequence[int]) -> None:
        super().place(histories)
        case, plans = self.case, []
        for history in histories:
            committed = self.folded + history
            absorbed = case.tokens if case.absorbs else 0
            plans.append((committed, self.folded, committed + absorbed if case.folds(history) else self.folded))
        rows = torch.arange(case.batch)
        self.step_info[:, Step.SLOT] = rows.int().to(DEVICE)
        self.step_info[:, Step.COMMITTED : Step.FOLD_TO + 1] = torch.tensor(plans).int()[rows % len(plans)].to(DEVICE)
        self.step_info[:, Step.QUERY_LEN] = case.tokens

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
