"""Choosing blocks: ``select_blocks`` and its cache against a plain loop, and its answer to equal scores."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_torch_ops import network
from torch import Tensor

from trtllm_replayssm.network import selection
from trtllm_replayssm.network.selection import largest

HEADS, WIDTH = 3, 4


def blocks_seen(scores: Tensor, position: int, block: int, count: int, length: int) -> list[bool]:
    """Positions that the token sees, from the scores of all blocks."""
    whole = (position + 1) // block
    best = sorted(range(whole), key=lambda b: (-float(scores[b]), b))[:count]
    return [p // block in best or whole * block <= p <= position for p in range(length)]


@pytest.mark.parametrize("piece", [1 << 26, 1])
@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize(("block", "count"), [(4, 2), (3, 1), (1, 5), (5, 3)])
def test_a_token_sees_its_best_blocks_and_the_rest_of_its_own(
    block: int, count: int, weighed: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at different positions, NaN behind what was written, scores piece by piece or at once."""
    monkeypatch.setattr(selection, "PIECE", piece)
    rows, tokens = [(0, 17, 3), (1, 2, 3), (-1, 0, 0), (3, 22, 1)], 3
    random = torch.Generator().manual_seed(block)
    q = torch.randn(4, tokens, HEADS, WIDTH, generator=random)
    weights = torch.randn(4, tokens, HEADS, generator=random) if weighed else None
    length = 25
    keys = torch.randn(4, 1, length // block + 2, WIDTH, generator=random)
    for row, (_, committed, valid) in enumerate(rows):
        keys[row, :, (committed + valid) // block :] = float("nan")
    seen = network(rows, kv_len=length).select_blocks(q, keys, weights, block, count)
    for row, (slot, committed, valid) in enumerate(rows):
        for t in range(valid if slot >= 0 else 0):
            products = (q[row, t] @ keys[row, 0].T).relu()
            scores = products.sum(0) if weights is None else weights[row, t] @ products
            expected = blocks_seen(scores, committed + t, block, count, committed + t + 1)
            assert seen[row, t, : committed + t + 1].tolist() == expected


def test_short_texts_are_seen_whole_without_a_word() -> None:
    q, keys = torch.randn(1, 1, HEADS, WIDTH), torch.randn(1, 1, 9, WIDTH)
    assert network([(0, 14, 1)], kv_len=15).select_blocks(q, keys, None, 4, 3) is None
    # One token more, and there are more whole blocks than are chosen.
    assert network([(0, 15, 1)], kv_len=16).select_blocks(q, keys, None, 4, 3) is not None


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_of_equal_scores_the_first_win(count: int) -> None:
    """Every order of few distinct scores, with and without blocks that are not to be had."""
    for values in itertools.product((0.0, 1.0, 2.0), repeat=4):
        for absent in (None, 1):
            scores, eligible = torch.tensor(values), torch.ones(4, dtype=torch.bool)
            if absent is not None:
                scores[absent], eligible[absent] = float("nan"), False
            order = sorted((i for i in range(4) if i != absent), key=lambda i: (-values[i], i))
            assert largest(scores, eligible, count).nonzero().flatten().tolist() == sorted(order[:count])


def test_keys_of_blocks_are_kept_where_blocks_end() -> None:
    cache, x = torch.full((3, 1, 6, 2), float("nan")), torch.arange(30.0).view(3, 5, 1, 2)
    assert network([(0, 6, 5), (-1, 0, 0), (2, 0, 3)]).block_cache_update(cache, x, 4) is cache
    # Row 0 has tokens 6 to 10, of which 7 ends a block; row 2 has tokens 0 to 2, which end none.
    assert torch.equal(cache[0, 0, 1], x[0, 1, 0])
    assert int(cache.isfinite().sum()) == 2
