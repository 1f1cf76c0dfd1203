"""Cursors: what a slot's state covers, and what the running step does to it.

Every cache of a slot is addressed by a token's position ``p`` in its request (0 for the first prompt token):

* the ring row of token ``p`` is ``p % ring_rows``, the column of the convolution ring ``p % conv_rows``, the row of the
  KV cache ``p``;
* ``committed`` tokens are final. Tokens of a step are written at positions ``committed ...`` and count only once a
  commit adds the accepted number to ``committed``; what was rejected is overwritten by the next step;
* the checkpoint holds tokens ``[0, folded)``. ``folded == 0`` means that it holds nothing and must not be read, so a
  recycled slot needs no clearing.

The live rows of a ring are therefore ``[folded, committed)``, ``h = committed - folded`` of them. In the notation of the
ReplaySSM papers the ring starts at ``s = folded % ring_rows``; keeping positions instead of ``(s, h)`` makes a commit one
addition, lets convolution and KV cache roll back by the same number, and needs no reset of any buffer. A step finds at most
the window in the ring, and one token less where the ring has no rows for drafts; appended tokens have rows of their own.
"""

from __future__ import annotations

from enum import IntEnum

#: int32 words of a slot's cursor row. 256 bytes, the alignment TensorRT asks of a bound address.
CURSOR_WORDS = 64
#: int32 words of a row of step info.
STEP_WORDS = 8


class Cursor(IntEnum):
    """Columns of the cursor pool, int32 ``[slots, CURSOR_WORDS]``.

    SEED: of stochastic rounding; a request keeps it wherever its state goes. Zero unless its owner sets it.
    """

    COMMITTED = 0
    FOLDED = 1
    SEED = 2


class Step(IntEnum):
    """Columns of step info, int32 ``[rows, STEP_WORDS]``: one row's plan, shared by every layer of the step.

    SLOT: slot of the row relative to the bound pools, or -1 for a padding row, which reads and writes nothing.
    COMMITTED, FOLDED: the slot's cursors before the step.
    FOLD_TO: tokens that the checkpoint covers after the step: FOLDED (unchanged), COMMITTED (flush: the ring is folded,
        the step's tokens are appended behind it) or COMMITTED + QUERY_LEN (absorb: ring and tokens are both folded).
    QUERY_LEN: valid tokens of the row, 1 to T; the rest are padding.
    SEED: the slot's.
    TURN: an order of the rows, of which the i-th is i plus this word of row i. Rows that fold come first: a kernel may take
        rows up in this order, so that the others fill the device while the last of these are at work, from both of its ends,
        or not at all; results do not depend on it. All zero is the order of the rows.
    """

    SLOT = 0
    COMMITTED = 1
    FOLDED = 2
    FOLD_TO = 3
    QUERY_LEN = 4
    SEED = 5
    TURN = 6


class RowMode(IntEnum):
    """What the caller asks of a row.

    DECODE: append the tokens, fold only when the ring would overflow (decided on the device).
    FLUSH: like DECODE, but fold the committed tokens now.
    ABSORB: fold everything including the row's tokens (prefill: all of them are known to be kept).
    """

    DECODE = 0
    FLUSH = 1
    ABSORB = 2
