"""One recurrent layer by itself: what goes into it, and pools and cursors as they are in the middle of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.plugins.reference.quantised_state import store_states
from trtllm_replayssm.plugins.reference.read_copy import write_copy

Attributes = Mamba2Attributes | GatedDeltaAttributes | KdaAttributes

#: Folded tokens of every slot before a timed step: an ordinary place in a long request.
FOLDED = 1000


class Dtypes(NamedTuple):
    """Of activations, checkpoint and ring."""

    activation: torch.dtype
    state: torch.dtype
    ring: torch.dtype


@dataclass(frozen=True)
class Signature:
    """kind: of the plugin layer. inputs: channels of a token's activations; weights: elements of the float32 weights; both in
    the order of the plugin's contract."""

    kind: str
    inputs: tuple[int, ...]
    weights: tuple[int, ...]


def signature(a: Attributes) -> Signature:
    if isinstance(a, Mamba2Attributes):
        inner, heads = a.num_heads * a.head_dim, a.num_heads
        return Signature("mamba2", (inner + 2 * a.n_groups * a.state_size, heads), (heads,) * 3)
    if isinstance(a, GatedDeltaAttributes):
        heads = a.num_value_heads
        channels = 2 * a.num_key_heads * a.key_dim + heads * a.value_dim
        return Signature("gated_delta", (channels, heads, heads), (heads, heads))
    heads, keys = a.num_heads, a.num_heads * a.key_dim
    return Signature("kda", (2 * keys + heads * a.value_dim, keys, heads), (heads, keys))


def plausible_pools(
    attributes: Attributes, dtypes: Dtypes, slots: int, device: torch.device | str
) -> dict[str, Tensor]:
    """Pools whose slots hold what those of running requests might; no step reads a zero or something that is no number."""
    described = attributes.pools(*dtypes)
    pools = {name: pool.allocate(slots, device) for name, pool in described.items()}
    every = torch.arange(slots, device=device)
    store_states(pools, every, 0.1 * torch.randn(pools["state"].shape, device=device))
    for name, low, high in (("ring_dt", 0.01, 0.2), ("ring_g", -0.2, 0.0), ("ring_beta", 0.0, 1.0)):
        if name in pools:
            pools[name].uniform_(low, high)
    for name in {"ring_x", "ring_b", "ring_k", "ring_v"} & pools.keys():
        pools[name].normal_()
    write_copy(pools, every)
    return pools


def cycle(window: int, tokens: int) -> list[int]:
    """Tokens in a ring before each step of ``tokens`` tokens, from one fold to the next, when all are kept.

    The last of these steps folds (plugins/advance.py).
    """
    return list(range(window)) if tokens == 1 else list(range(tokens, window + 1, tokens))


def step_info(
    window: int,
    histories: Sequence[int],
    tokens: int,
    rows: int,
    device: torch.device | str = "cpu",
    folded: int | Tensor = FOLDED,
    mode: RowMode = RowMode.DECODE,
) -> Tensor:
    """int32 ``[rows, STEP_WORDS]`` of a step in which row r finds ``histories[r % len(histories)]`` tokens in its ring.

    folded: tokens that each row's checkpoint covers, one number or ``[rows]``.
    """
    row = torch.arange(rows, dtype=torch.int32)
    cursors = torch.zeros(rows, CURSOR_WORDS, dtype=torch.int32)
    cursors[:, Cursor.FOLDED] = folded
    cursors[:, Cursor.COMMITTED] = folded + torch.tensor(histories, dtype=torch.int32)[row % len(histories)]
    lengths, modes = torch.full_like(row, tokens), torch.full_like(row, int(mode))
    return advance(AdvanceAttributes(window), cursors, row, lengths, modes, tokens).to(device)


def log_decays(attributes: Attributes, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Logarithms of what is left of a state after one token whose gate logits are 0: by head, or by head and channel."""
    if isinstance(attributes, Mamba2Attributes):
        return -A_log.exp() * softplus(dt_bias).clamp(attributes.dt_min, attributes.dt_max)
    if isinstance(attributes, GatedDeltaAttributes):
        return -A_log.exp() * softplus(dt_bias)
    rate, logits = A_log.exp()[:, None], dt_bias.unflatten(0, (attributes.num_heads, attributes.key_dim))
    bound = attributes.lower_bound
    return -rate * softplus(logits) if bound is None else bound * (rate * logits).sigmoid()
