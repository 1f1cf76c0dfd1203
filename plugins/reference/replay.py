"""The step that every recurrence shares: rebuild the state from checkpoint and ring, answer, fold, append."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import Step
from trtllm_replayssm.plugins.read_copy import read_dtype_of
from trtllm_replayssm.plugins.reference.quantised_state import store_states, stored_states
from trtllm_replayssm.plugins.reference.read_copy import read_copy, write_copy
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS

#: Named entries of tokens: ``[rows, tokens, heads, ...]``, or ``[rows, heads, ...]`` for one token of each row.
Tokens = dict[str, Tensor]


class Recurrence(ABC):
    """One recurrence over tokens, in the compute dtype.

    ``payload`` names the entries of a token that a ring stores, each under the pool ``ring_<name>``. What does not depend
    on the state is worked out for all tokens at once (``prepare``, ``answer``); ``update`` and ``read`` take one token.
    A token whose payload is zero must leave the state as it is, which is how padding is skipped.
    """

    payload: tuple[str, ...]

    @abstractmethod
    def prepare(self, tokens: Tokens, from_ring: bool) -> Tokens:
        """What ``update`` and ``read`` need of ``tokens``; ``from_ring`` says that they are payload read back."""

    @abstractmethod
    def update(self, state: Tensor, token: Tokens) -> Tokens:
        """Advance ``state [rows, heads, value_dim, width]`` in place; returns payload entries that replace the token's."""

    @abstractmethod
    def read(self, state: Tensor, token: Tokens) -> Tensor:
        """What the token reads from the state after it, ``[rows, heads, value_dim]``."""

    def answer(self, reads: Tensor, tokens: Tokens) -> Tensor:
        """The outputs, from all reads ``[rows, tokens, heads, value_dim]`` and the unprepared tokens."""
        return reads


def compute_dtype(state: Tensor) -> torch.dtype:
    """float64 for the float64 pools of the oracle tests, else float32."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def keep(mask: Tensor, x: Tensor) -> Tensor:
    """``x`` where ``mask``, which covers its leading axes, and zero elsewhere, whatever stands there (also NaN)."""
    mask = mask.view(*mask.shape, *([1] * (x.ndim - mask.ndim)))
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def matvec(state: Tensor, x: Tensor) -> Tensor:
    """``S x`` per head: state ``[rows, H, V, K]``, x ``[rows, G, K]`` shared by ``H / G`` heads; ``[rows, H, V]``."""
    rows, heads, values, width = state.shape
    groups = x.shape[1]
    stacked = state.view(rows, groups, heads // groups * values, width)
    # A row vector times the transpose: several times faster on CPUs than a matrix times a column.
    return (x[:, :, None] @ stacked.transpose(2, 3)).view(rows, heads, values)


def add_outer(state: Tensor, u: Tensor, x: Tensor) -> None:
    """``S += u x^T`` per head, in place: u ``[rows, H, V]``, x ``[rows, G, K]`` shared by ``H / G`` heads."""
    rows, _, values, width = state.shape
    groups = x.shape[1]
    state.view(rows, groups, -1, values, width).addcmul_(u.view(rows, groups, -1, values, 1), x[:, :, None, None])


def load_state(pools: dict[str, Tensor], slots: Tensor, folded: Tensor, copied: bool = False) -> Tensor:
    """The checkpoints of ``slots``, or their read copies; zero, whatever the pools hold, where nothing was folded yet."""
    state, slots = pools["state"], slots.clamp(min=0)
    loaded = read_copy(pools, slots) if copied else stored_states(pools, slots)
    return keep(folded > 0, loaded.to(compute_dtype(state))).contiguous()


def ring_tokens(
    recurrence: Recurrence, pools: dict[str, Tensor], slots: Tensor, folded: Tensor, until: Tensor, dtype: torch.dtype
) -> Tokens:
    """The ring's record of tokens ``[folded, until)``; rows with fewer than the longest end in zeros."""
    longest = int((until - folded).max()) if len(slots) else 0
    position = folded[:, None] + torch.arange(longest, device=slots.device)
    live, slot = position < until[:, None], slots.clamp(min=0)[:, None]
    tokens = {}
    for name in recurrence.payload:
        pool = pools[f"ring_{name}"]
        tokens[name] = keep(live, pool[slot, :, position % pool.shape[2]]).to(dtype)
    return tokens


def replay_history(
    recurrence: Recurrence,
    pools: dict[str, Tensor],
    slots: Tensor,
    folded: Tensor,
    until: Tensor,
    copied: bool = False,
) -> Tensor:
    """State ``[rows, heads, ...]`` after tokens ``[0, until)`` of each slot, from its checkpoint and its ring.

    copied: start from the read copy of the checkpoint instead.
    """
    state = load_state(pools, slots, folded, copied)
    tokens = ring_tokens(recurrence, pools, slots, folded, until, state.dtype)
    for token in each(recurrence.prepare(tokens, from_ring=True)):
        recurrence.update(state, token)
    return state


def each(tokens: Tokens) -> list[Tokens]:
    """``tokens`` one by one along their second axis."""
    columns = [value.unbind(1) for value in tokens.values()]
    return [dict(zip(tokens, column)) for column in zip(*columns)]


def replay_step(
    recurrence: Recurrence,
    tokens: Tokens,
    step: Tensor,
    pools: dict[str, Tensor],
    rounded: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """One step of every row: the contract of ``mamba2``, ``gated_delta`` and ``kda``.

    tokens: entries ``[rows, T, heads, ...]`` in the compute dtype.
    step: int32 ``[rows, STEP_WORDS]``.
    pools: ``state [slots, heads, ...]``, ``ring_<name> [slots, heads, ring_rows, ...]`` and those of the read copy where the
        layer has one, changed in place.
    rounded: makes states ``[rows, heads, ...]`` with their step info ``[rows, STEP_WORDS]`` fit the checkpoint's dtype;
        by default they are rounded to the nearest, or quantised.
    Returns ``[rows, T, heads, value_dim]`` in the compute dtype, zero for padding rows and tokens.
    """
    columns = step.long().unbind(1)
    named = (Step.SLOT, Step.COMMITTED, Step.FOLDED, Step.FOLD_TO, Step.QUERY_LEN)
    slots, committed, folded, fold_to, query_len = (columns[column] for column in named)
    live = slots >= 0
    length = next(iter(tokens.values())).shape[1]
    valid = live[:, None] & (torch.arange(length, device=step.device) < query_len[:, None])
    tokens = {name: keep(valid, value) for name, value in tokens.items()}

    copied = length <= MAX_VERIFY_TOKENS and read_dtype_of(pools) != "same"
    flushes, absorbs = live & (fold_to > folded) & (fold_to <= committed), live & (fold_to > committed)
    history = recurrence, pools, slots, folded, torch.where(live, committed, folded)
    seen = replay_history(*history, copied)
    # The state that outputs see is also the one that is folded, unless it comes from the copy.
    state = replay_history(*history) if copied and bool((flushes | absorbs).any()) else seen

    def fold(where: Tensor) -> None:
        rows = where.nonzero(as_tuple=True)[0]
        if len(rows):
            kept = state[rows] if rounded is None else rounded(state[rows], step[rows])
            store_states(pools, slots[rows], kept)
            write_copy(pools, slots[rows])

    fold(flushes)
    prepared, reads, derived = each(recurrence.prepare(tokens, from_ring=False)), [], []
    for token in prepared:
        derived.append(recurrence.update(seen, token))
        reads.append(recurrence.read(seen, token))
    if state is not seen:
        for token in prepared:
            recurrence.update(state, token)
    fold(absorbs)

    payload = {name: tokens[name] for name in recurrence.payload}
    payload |= {name: torch.stack([token[name] for token in derived], 1) for name in derived[0]}
    # A row that absorbs has folded its tokens, so nobody would read them from the ring.
    append_tokens(payload, pools, slots, committed, valid & (fold_to <= committed)[:, None])
    return keep(valid, recurrence.answer(torch.stack(reads, 1), tokens))


def append_tokens(payload: Tokens, pools: dict[str, Tensor], slots: Tensor, committed: Tensor, where: Tensor) -> None:
    """Store the tokens selected by ``where [rows, T]`` at positions ``committed ...`` of the rings of their slots."""
    rows, offsets = where.nonzero(as_tuple=True)
    for name, value in payload.items():
        pool = pools[f"ring_{name}"]
        row = (committed[rows] + offsets) % pool.shape[2]
        pool[slots[rows], :, row] = value[rows, offsets].to(pool.dtype)
