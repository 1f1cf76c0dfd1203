"""One answer for all ranks: where rounding could tell their choices apart, rank 0's counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trtllm_replayssm.runtime.engine import Engine

#: Behind the ids of a row that has fewer than others; no id, and not sampling.NO_TOKEN, which may be one of them.
PADDING = -2


def agreed(rows: Sequence[Sequence[int]], longest: int, engine: Engine) -> list[list[int]]:
    """Rank 0's rows, of token ids; every rank has as many rows, none with more than ``longest`` ids."""
    if engine.group is None:
        return [list(row) for row in rows]
    table = torch.tensor([[*row, *[PADDING] * (longest - len(row))] for row in rows], device=engine.device)
    dist.broadcast(table, 0, group=engine.group)
    return [[token for token in row if token != PADDING] for row in table.tolist()]


def agree(tokens: Tensor, engine: Engine) -> Tensor:
    """The tensor of token ids as rank 0 has it, in place and without waiting for a GPU."""
    if engine.group is not None:
        dist.broadcast(tokens, 0, group=engine.group)
    return tokens
