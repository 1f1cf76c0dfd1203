"""What a caller hands to a step, checked before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode

#: One value per row, as a tensor or a sequence.
PerRow = Tensor | Sequence[int] | Sequence[bool]


@dataclass(frozen=True)
class StepInput:
    """A step's rows on the host.

    token_ids: int32 ``[rows, T]``, 0 where there is no valid token; on the GPU where they were given there. query_lens,
    modes: int32 ``[rows]``; 1 and DECODE in rows that are not active. active: bool ``[rows]``.
    """

    token_ids: Tensor
    query_lens: Tensor
    modes: Tensor
    active: Tensor

    @classmethod
    def create(
        cls,
        token_ids: Tensor | Sequence[Sequence[int]],
        query_lens: PerRow | None,
        modes: PerRow | None,
        active: PerRow | None,
        vocab_size: int,
    ) -> StepInput:
        """Defaults: every token valid, every row DECODE and active.

        Ids on a GPU stay there and are not looked at, because the host would have to wait for them: they must be in the
        vocabulary. Raises UserError for wrong shapes, lengths outside 1..T, unknown modes, and ids outside the vocabulary.
        """
        try:
            ids = torch.as_tensor(token_ids)
        except (ValueError, TypeError) as error:
            raise UserError(f"token_ids are not a table of integers: {error}") from None
        if ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UserError(f"token_ids must be integers [rows, T], not {ids.dtype} {list(ids.shape)}")
        rows, tokens = ids.shape
        live = per_row("active", active, rows, True).bool()
        lengths = torch.where(live, per_row("query_lens", query_lens, rows, tokens), 1)
        kinds = torch.where(live, per_row("modes", modes, rows, int(RowMode.DECODE)), int(RowMode.DECODE))
        if bool(((lengths < 1) | (lengths > tokens)).any()):
            raise UserError(f"query_lens are {lengths.tolist()}; they must be 1 to {tokens}, the tokens of a row")
        if bool((~torch.isin(kinds, torch.tensor([int(mode) for mode in RowMode]))).any()):
            raise UserError(f"modes are {kinds.tolist()}; use values of RowMode")
        if ids.device.type == "cuda":
            return cls(ids.int(), lengths.int(), kinds.int(), live)
        valid = live[:, None] & (torch.arange(tokens) < lengths[:, None])
        ids = torch.where(valid, ids.long(), 0)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise UserError(f"token id {int(outside[0])} is outside the vocabulary of {vocab_size}")
        return cls(ids.int(), lengths.int(), kinds.int(), live)

    def widened(self, tokens: int) -> StepInput:
        """The same tokens in a longer step, of ``tokens`` (T) a row."""
        return replace(self, token_ids=pad(self.token_ids, (0, tokens - self.token_ids.shape[1])))


def per_row(name: str, values: PerRow | None, rows: int, default: int) -> Tensor:
    """The values as a tensor ``[rows]`` on the host. Raises UserError when there are not ``rows`` of them."""
    if values is None:
        return torch.full((rows,), default)
    tensor = torch.as_tensor(values).cpu()
    if tensor.shape != (rows,):
        raise UserError(f"{name} has shape {list(tensor.shape)}, expected one value for each of {rows} rows")
    return tensor
