"""Stochastic rounding of 16-bit states: to one of the two neighbours, with the probabilities that make the mean exact.

Rounding to the nearest loses every update that is smaller than half a unit in the last place, always in the same
direction; rounded at random such updates count on average.

The random bits are a function of what is rounded, not of when or where: of the slot's seed (``cursors.Cursor.SEED``), the
position up to which the state was folded, and the element's index in the layer's state. A request therefore gives the same
bits in any slot, alone or in a batch, and again when it is run again.

    element e of a slot's state: 16 bits, number e % 8 (low half of word e % 8 / 2 first) of the four words
        Philox-4x32-10(counter = (e // 8, position, 0, 0), key = (seed, 0))

(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). x between neighbours a < |x| < a + ulp becomes a + ulp
in magnitude if its fraction of an ulp, in steps of 2^-16, and the 16 bits over 2^16 add up to 1 or more. float16 has
fractions of 2^-13 above its subnormal numbers, and takes the upper 13 bits there. What is infinite or no number stays so.
"""

from __future__ import annotations

#: Multipliers and key increments of Philox-4x32, and its rounds.
MULTIPLIERS, INCREMENTS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
#: Elements that share a call.
ELEMENTS = 8
