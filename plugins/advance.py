"""``replayssm::advance``: turns the cursors of a step's rows into their plan, once per step, before the first layer.

| tensor     | shape                  | dtype | direction                                         |
|------------|------------------------|-------|---------------------------------------------------|
| cursors    | [slots, CURSOR_WORDS]  | int32 | in and out, one address                           |
| slot_ids   | [rows]                 | int32 | in; slot of each row, -1 for padding              |
| query_lens | [rows]                 | int32 | in; valid tokens of each row, 1..T                |
| modes      | [rows]                 | int32 | in; cursors.RowMode                               |
| token_ids  | [rows, T]              | int32 | in; only its shape is used                        |
| step       | [rows, STEP_WORDS]     | int32 | out; cursors.Step                                 |

With ``h = committed - folded``, a DECODE row

* absorbs when the step has one token a row (T = 1) and ``h + 1 >= window``: the one token is known to be kept, so it is
  folded with the ring, and window 1 is the ordinary recurrence;
* flushes when ``h + T > window``: the rows of this step would not leave room for the next. Committed rows only are folded;
* otherwise leaves the checkpoint alone.

The order in which kernels may take rows up begins with those that fold (``Step.TURN``).

``advance`` writes ``folded`` to its value after the step and leaves ``committed`` to the commit, which adds the number of
accepted tokens (all of them after an ABSORB) to ``cursors[slot, COMMITTED]``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvanceAttributes:
    """window: committed tokens a ring may hold (replay.ReplayConfig.window)."""

    window: int
