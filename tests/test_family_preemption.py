"""Requests of every family leave their slot in the middle of a window and go on in another one, as transformers would."""

from __future__ import annotations

import torch
from test_parity import PROMPT, ROWS, Case, absorb, case, decode, every_model

from trtllm_replayssm.runtime.session import Session

#: Tokens that wait in the ring when a request is taken out; a ring holds 8.
WAITING, AFTER = 5, 12


def interrupted(c: Case) -> Session:
    """A session whose slots hold PROMPT + WAITING tokens each, with rejected drafts behind them."""
    session = c.session(window=8, max_draft_len=3)
    absorb(session, c.ids[:, :PROMPT])
    decode(session, c.ids[:, PROMPT : PROMPT + WAITING - 1])
    drafts = torch.cat([c.ids[:, PROMPT + WAITING - 1 : PROMPT + WAITING], c.ids[:, :3]], 1)
    session.step(drafts)
    session.commit(0, [1] * ROWS)
    return session


def go_on(c: Case, session: Session, slot: int, row: int, start: int) -> None:
    for position in range(start, start + AFTER):
        logits = session.step(c.ids[row : row + 1, position : position + 1], slot)
        session.commit(slot, [1])
        c.check(logits[0], row, position)


@every_model
def test_a_saved_request_goes_on_in_the_slot_of_another(name: str) -> None:
    c = case(name)
    session = interrupted(c)
    state = session.save(0)
    session.step(c.ids[:, :1])
    session.commit(0, [1] * ROWS)
    session.restore(2, state)
    go_on(c, session, 2, 0, PROMPT + WAITING)


@every_model
def test_a_prefix_of_a_request_goes_on_in_the_slot_of_another(name: str) -> None:
    c = case(name)
    session = interrupted(c)
    for prefix in (PROMPT + WAITING - 1, PROMPT + WAITING):
        session.materialise(1, 0, prefix)
        go_on(c, session, 0, 1, prefix)
