"""``advance`` and the options it depends on, against a model of a ring in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS, Cursor, RowMode, Step
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReplayConfig

KERNEL = 4


def plan(
    cursors: torch.Tensor, window: int, slots: list[int], lens: list[int], modes: list[int], tokens: int
) -> torch.Tensor:
    ids, lengths, kinds = (torch.tensor(values, dtype=torch.int32) for values in (slots, lens, modes))
    return advance(AdvanceAttributes(window), cursors, ids, lengths, kinds, tokens)


class Ring:
    """Which token each physical row holds; reading a token that is not there is the bug that the tests look for."""

    def __init__(self, rows: int) -> None:
        self.rows: list[int | None] = [None] * rows

    def write(self, position: int) -> None:
        self.rows[position % len(self.rows)] = position

    def holds(self, position: int) -> bool:
        return self.rows[position % len(self.rows)] == position


@st.composite
def histories(draw: st.DrawFn) -> tuple[ReplayConfig, list[tuple[int, int, int, RowMode]]]:
    """A configuration and steps ``(T, query_len, accepted, mode)`` as an engine may issue them."""
    drafts = draw(st.integers(0, MAX_VERIFY_TOKENS - 1))
    window = draw(st.integers(drafts + 1 if drafts else 1, 64))
    replay, steps = ReplayConfig(window=window, max_draft_len=drafts), []
    for _ in range(draw(st.integers(1, 60))):
        if draw(st.integers(0, 9)) == 0:
            tokens = draw(st.integers(1, 40))
            length = draw(st.integers(1, tokens))
            steps.append((tokens, length, length, RowMode.ABSORB))
            continue
        tokens = draw(st.integers(1, replay.verify_tokens))
        length = draw(st.integers(1, tokens))
        # The one token of a T = 1 step is known to be kept; of a verify step anything may be, also nothing (abort).
        accepted = 1 if tokens == 1 else draw(st.integers(0, length))
        steps.append((tokens, length, accepted, draw(st.sampled_from((RowMode.DECODE, RowMode.FLUSH)))))
    return replay, steps


@settings(max_examples=150, deadline=None)
@given(histories())
def test_no_history_of_steps_loses_a_token(history: tuple[ReplayConfig, list[tuple[int, int, int, RowMode]]]) -> None:
    """Window and ring bounds, no live row overwritten, monotone folds, and the documented rule, after any steps."""
    replay, steps = history
    cursors = torch.zeros(1, CURSOR_WORDS, dtype=torch.int32)
    ring, conv = Ring(replay.ring_rows), Ring(CausalConvAttributes.create(1, KERNEL, replay).conv_rows)
    committed = folded = 0
    for tokens, length, accepted, mode in steps:
        row = plan(cursors, replay.window, [0], [length], [int(mode)], tokens)[0]
        slot, before, start, fold_to, query_len, _, turn = (int(row[c]) for c in Step)
        assert turn == 0
        assert (slot, before, start, query_len) == (0, committed, folded, length)
        h = committed - folded
        if mode == RowMode.ABSORB or (tokens == 1 and h + 1 >= replay.window):
            assert fold_to == committed + length
        elif mode == RowMode.FLUSH or h + tokens > replay.window:
            assert fold_to == committed
        else:
            assert fold_to == folded
        assert folded <= fold_to == int(cursors[0, Cursor.FOLDED])
        assert all(ring.holds(p) for p in range(folded, committed)), "a step reads its whole history"
        assert all(conv.holds(p) for p in range(max(committed - KERNEL + 1, 0), committed))
        if fold_to <= committed:
            for position in range(committed, committed + length):
                ring.write(position)
        for position in range(committed, committed + length):
            conv.write(position)
        folded, committed = fold_to, committed + accepted
        cursors[0, Cursor.COMMITTED] += accepted
        assert 0 <= committed - folded <= replay.window
        assert not cursors[0, 2:].any(), "the rest of the cursor row is not ours"


def test_rows_are_independent_and_padding_is_inert() -> None:
    """A padding row whose slot is -1 must not be taken for slot 0."""
    cursors = torch.zeros(4, CURSOR_WORDS, dtype=torch.int32)
    cursors[:, Cursor.COMMITTED] = torch.tensor([10, 20, 30, 40])
    cursors[:, Cursor.FOLDED] = torch.tensor([8, 13, 24, 40])
    step = plan(
        cursors, 8, [3, -1, 1, 0], [3, 3, 2, 1], [RowMode.ABSORB, RowMode.ABSORB, RowMode.DECODE, RowMode.FLUSH], 3
    )
    assert step.shape == (4, STEP_WORDS)
    assert step.dtype == torch.int32
    assert step[:, :5].tolist() == [[3, 40, 40, 43, 3], [-1, 0, 0, 0, 0], [1, 20, 13, 20, 2], [0, 10, 8, 10, 1]]
    assert step[:, Step.TURN].tolist() == [0, 1, 1, -2], "rows that fold come first: 0, 2, 3, then 1"
    assert cursors[:, Cursor.FOLDED].tolist() == [10, 20, 24, 43]
    assert cursors[:, Cursor.COMMITTED].tolist() == [10, 20, 30, 40]


def test_every_row_has_a_turn_and_those_that_fold_come_first() -> None:
    rows, draw = 300, torch.Generator().manual_seed(0)
    cursors = torch.zeros(rows, CURSOR_WORDS, dtype=torch.int32)
    cursors[:, Cursor.COMMITTED] = torch.randint(0, 16, (rows,), generator=draw)
    slots = torch.where(torch.rand(rows, generator=draw) < 0.9, torch.randperm(rows, generator=draw), -1)
    step = plan(cursors, 16, slots.tolist(), [4] * rows, [RowMode.DECODE] * rows, 4)
    order = torch.arange(rows) + step[:, Step.TURN]
    assert order.sort().values.tolist() == list(range(rows))
    folds = (step[:, Step.FOLD_TO] > step[:, Step.FOLDED])[order]
    assert 0 < folds.sum() < rows and not (folds[1:] & ~folds[:-1]).any()


@pytest.mark.parametrize("tokens", range(2, MAX_VERIFY_TOKENS + 1))
def test_history_depends_on_the_window_alone(tokens: int) -> None:
    """A step narrower than 16 tokens does not shorten the history: rows fold only when window would be exceeded."""
    for history in range(17):
        cursors = torch.zeros(1, CURSOR_WORDS, dtype=torch.int32)
        cursors[0, Cursor.COMMITTED], cursors[0, Cursor.FOLDED] = 50 + history, 50
        row = plan(cursors, 16, [0], [1], [RowMode.DECODE], tokens)[0]
        assert int(row[Step.FOLD_TO]) == (50 + history if history + tokens > 16 else 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "must be 1 to 64"),
        ({"window": 65}, "must be 1 to 64"),
        ({"max_draft_len": -1}, "must be 0 to 15"),
        ({"max_draft_len": 16}, "must be 0 to 15"),
        ({"window": 7, "max_draft_len": 7}, "shorter than a verify step of 8 tokens"),
        ({"state_dtype": "float64"}, "state_dtype 'float64' is not known"),
        ({"state_dtype": "int4"}, "state_dtype 'int4' is not known"),
        ({"ring_dtype": "fp16"}, "ring_dtype 'fp16' is not known"),
        ({"fold": "Exact"}, "replay_fold 'Exact' is not known"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict, message: str) -> None:
    """A window or ring that is too short for its verify step must fail when it is asked for, not in mid-service."""
    with pytest.raises(UserError, match=message) as raised:
        ReplayConfig(**options)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("window", "drafts", "rows", "verify"),
    [(1, 0, 1, 1), (16, 0, 16, 1), (8, 7, 16, 8), (16, 15, 32, 16), (64, 1, 66, 2)],
)
def test_sizes_that_follow_from_the_options(window: int, drafts: int, rows: int, verify: int) -> None:
    replay = ReplayConfig(window=window, max_draft_len=drafts)
    assert (replay.ring_rows, replay.verify_tokens) == (rows, verify)
    assert ReplayConfig(**replay.to_dict()) == replay
