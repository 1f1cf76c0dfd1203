"""The step that every recurrence shares: rebuild the state from checkpoint and ring, answer, fold, append."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from trtllm_replayssm.plugins.cursors import Step

Token = dict[str, Tensor]


class Recurrence(ABC):
    """One recurrence over tokens. A token is a dict of tensors ``[rows, heads, ...]`` in the compute dtype.

    ``payload`` names the entries of a token that a ring stores, each under the pool ``ring_<name>``.
    """

    payload: tuple[str, ...]

    @abstractmethod
    def update(self, state: Tensor, token: Token) -> Tensor:
        """State ``[rows, heads, ...]`` after a new token; may add derived payload entries to the token."""

    def replay(self, state: Tensor, token: Token) -> Tensor:
        """State after a token that was read back from the ring."""
        return self.update(state, token)

    @abstractmethod
    def read(self, state: Tensor, token: Token) -> Tensor:
        """Output ``[rows, heads, value_dim]`` of a token, given the state after it."""


def compute_dtype(state: Tensor) -> torch.dtype:
    """float64 for the float64 pools of the oracle tests, else float32."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def rows_like(mask: Tensor, x: Tensor) -> Tensor:
    """``mask [rows]`` shaped to broadcast over ``x [rows, ...]``."""
    return mask.view(-1, *([1] * (x.ndim - 1)))


def load_state(state_pool: Tensor, slots: Tensor, folded: Tensor) -> Tensor:
    """Checkpoints of ``slots``; zero, whatever the pool holds, where nothing was folded yet."""
    loaded = state_pool[slots.clamp(min=0)].to(compute_dtype(state_pool))
    return torch.where(rows_like(folded > 0, loaded), loaded, torch.zeros((), dtype=loaded.dtype, device=loaded.device))


def ring_token(recurrence: Recurrence, pools: dict[str, Tensor], slots: Tensor, position: Tensor, dtype: torch.dtype) -> Token:
    """The ring's record of token ``position [rows]`` of each slot."""
    token = {}
    for name in recurrence.payload:
        pool = pools[f"ring_{name}"]
        token[name] = pool[slots.clamp(min=0), :, position % pool.shape[2]].to(dtype)
    return token


def replay_history(
    recurrence: Recurrence, pools: dict[str, Tensor], slots: Tensor, folded: Tensor, until: Tensor
) -> Tensor:
    """State after tokens ``[0, until)`` of each slot, from its checkpoint and its ring."""
    state = load_state(pools["state"], slots, folded)
    longest = int((until - folded).max()) if len(slots) else 0
    for j in range(longest):
        position = folded + j
        replayed = recurrence.replay(state, ring_token(recurrence, pools, slots, position, state.dtype))
        state = torch.where(rows_like(position < until, state), replayed, state)
    return state


def replay_step(
    recurrence: Recurrence, tokens: Token, step: Tensor, pools: dict[str, Tensor]
) -> Tensor:
    """One step of every row: the contract of ``mamba2``, ``gated_delta`` and ``kda``.

    tokens: entries ``[rows, T, heads, ...]`` in the compute dtype.
    step: int32 ``[rows, STEP_WORDS]``.
    pools: ``state [slots, heads, ...]`` and ``ring_<name> [slots, heads, ring_rows, ...]``, changed in place.
    Returns ``[rows, T, heads, value_dim]`` in the compute dtype, zero for padding rows and tokens.
    """
    slots, committed, folded, fold_to, query_len = (
        step[:, column].long() for column in (Step.SLOT, Step.COMMITTED, Step.FOLDED, Step.FOLD_TO, Step.QUERY_LEN)
    )
    live = slots >= 0
    state = replay_history(recurrence, pools, slots, folded, torch.where(live, committed, folded))
    checkpoint = state
    outputs = []
    length = next(iter(tokens.values())).shape[1]
    for i in range(length):
        token = {name: value[:, i] for name, value in tokens.items()}
        valid = live & (i < query_len)
        state = torch.where(rows_like(valid, state), recurrence.update(state, token), state)
        output = recurrence.read(state, token)
        outputs.append(torch.where(rows_like(valid, output), output, torch.zeros_like(output)))
        # A row that absorbs folds its tokens at once, so nobody would read them from the ring.
        append_token(recurrence, pools, token, slots, committed + i, valid & (fold_to <= committed))
    checkpoint = torch.where(rows_like(fold_to > committed, state), state, checkpoint)
    folds = live & (fold_to > folded)
    pools["state"][slots[folds]] = checkpoint[folds].to(pools["state"].dtype)
    return torch.stack(outputs, 1)


def append_token(
    recurrence: Recurrence, pools: dict[str, Tensor], token: Token, slots: Tensor, position: Tensor, where: Tensor
) -> None:
    """Store ``token`` at ``position [rows]`` in the rings of the rows selected by ``where``."""
    for name in recurrence.payload:
        pool = pools[f"ring_{name}"]
        pool[slots[where], :, position[where] % pool.shape[2]] = token[name][where].to(pool.dtype)
