"""Sampling: parameters that make no sense are refused; choices follow the distribution and nothing but their inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.sampling import (
    NO_TOKEN,
    ROWS_AT_ONCE,
    SamplingParams,
    choose,
    choose_all,
    draw,
    likeliest_first,
    mask_padding,
    uniform,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("end_id", -2),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_k": 5}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"top_k": 0}, False),
        ({"top_p": 1.0}, False),
    ],
)
def test_greedy_by_default_and_at_the_limits(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).greedy is greedy


def test_end_ids_come_from_the_checkpoint_unless_given() -> None:
    assert SamplingParams().end_ids([1, 2]) == {1, 2}
    assert SamplingParams(end_id=7).end_ids([1, 2]) == {7}
    assert SamplingParams(end_id=-1).end_ids([1, 2]) == frozenset()
    assert SamplingParams(ignore_eos=True, stop_token_ids=[5]).end_ids([1, 2]) == {5}


def test_random_numbers_are_even_and_unrelated() -> None:
    grid = torch.tensor([[uniform(seed, position) for position in range(400)] for seed in range(50)]).double()
    assert ((grid >= 0) & (grid < 1)).all()
    counts = torch.histc(grid, 20, 0, 1)
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    centred = grid - 0.5
    for pairs in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(pairs.mean())) < 5 / 12 / pairs.numel() ** 0.5


def frequencies(logits: torch.Tensor, draws: int = 4000, **params: Any) -> torch.Tensor:
    chosen = [choose(logits, SamplingParams(seed=3, **params), position) for position in range(draws)]
    return torch.bincount(torch.tensor(chosen), minlength=len(logits)).double() / draws


def expected(logits: torch.Tensor, kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    probabilities = torch.zeros(len(logits), dtype=torch.double)
    probabilities[kept] = (logits[kept].double() / temperature).softmax(-1)
    return probabilities


LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 1.5])  # by likelihood: 1, 4, 3, 0, 2


@pytest.mark.parametrize(
    ("params", "kept", "temperature"),
    [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4], 1.0),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4], 0.5),
        ({"top_k": 3}, [1, 3, 4], 1.0),
        ({"top_k": 99}, [0, 1, 2, 3, 4], 1.0),
        ({"top_p": 0.5}, [1, 4], 1.0),
        ({"top_p": 1e-9}, [1], 1.0),
        ({"top_k": 3, "top_p": 0.7, "temperature": 2.0}, [1, 3, 4], 2.0),
    ],
)
def test_choices_follow_the_distribution(params: dict[str, Any], kept: list[int], temperature: float) -> None:
    found = frequencies(LOGITS, **params)
    wanted = expected(LOGITS, kept, temperature)
    assert (found[wanted == 0] == 0).all()
    assert (found - wanted).abs().max() < 4 * 0.5 / 4000**0.5


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert choose(LOGITS * 1e30, SamplingParams(temperature=1e-30), 0) == 1


def test_a_choice_depends_on_seed_position_and_logits_alone() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(20)]
    first = [choose(logits, p, 5) for p in params]
    torch.manual_seed(999)
    assert [choose(logits.clone(), p, 5) for p in params] == first
    assert [choose(logits, p, 6) for p in params] != first
    assert len(set(first)) > 5


def test_padding_is_never_chosen() -> None:
    logits = torch.full((1, 8), -5.0)
    logits[0, 6:] = 50.0
    masked = mask_padding(logits, 6)[0]
    assert torch.isinf(masked[6:]).all()
    assert choose(masked, SamplingParams(), 0) < 6
    assert all(choose(masked, SamplingParams(temperature=5.0), position) < 6 for position in range(200))
    assert logits[0, 7] == 50.0
    assert mask_padding(logits, None) is logits
    assert mask_padding(logits, 6, in_place=True) is logits
    assert torch.equal(logits[0], masked)


def test_rows_drawn_together_get_what_each_would_get_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(7, 3, 2000, generator=generator) * 2
    logits[4] = logits[4].round()  # many equal logits
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9, "temperature": 1.5},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 1500},
    ]
    rows = {row: (SamplingParams(seed=row, **kind), 10 + row) for row, kind in enumerate(kinds)}
    together = choose_all(logits, rows).tolist()
    damaged = logits.clone()
    damaged[:, 1, -1] = float("nan")
    assert choose_all(damaged, rows).tolist() == [[first, NO_TOKEN, last] for first, _, last in together]
    for row, (params, start) in rows.items():
        assert together[row] == [choose(logits[row, i], params, start + i) for i in range(3)]
        alone = choose_all(logits[row : row + 1], {0: (params, start)}).tolist()
        assert together[row] == alone[0]
    assert together[6] == logits[6].argmax(-1).tolist()


def test_equal_logits_are_ordered_by_their_ids() -> None:
    logits = torch.tensor([[1.0, -3.0, 1.0, -0.5, 2.0, -0.5, -math.inf, 1.0]])
    assert likeliest_first(logits, 8)[0].tolist() == [4, 0, 2, 7, 3, 5, 1, 6]
    assert likeliest_first(logits, 3)[0].tolist() == [4, 0, 2]


def test_many_rows_are_drawn_in_pieces() -> None:
    logits = torch.randn(ROWS_AT_ONCE + 3, 9, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=1.0)] * len(logits)
    shares = [uniform(0, i) for i in range(len(logits))]
    pieces = [int(draw(row[None], params[:1], [share])[0]) for row, share in zip(logits, shares)]
    assert draw(logits, params, shares).tolist() == pieces
