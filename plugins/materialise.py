"""``replayssm::materialise``: writes the state of a prefix of one slot into another slot.

The destination then stands for the first ``prefix_len`` tokens of the source with an empty ring
(``committed = folded = prefix_len``); the source is only read. The recurrent pools allow any
``folded <= prefix_len <= committed``. The convolution ring keeps the ``kernel - 1`` tokens before the last step's first
token and everything behind it, so call this after the commit of the step that crossed the boundary.

Of a recurrent layer's pools only ``state`` is written, at the destination, and its read copy where the layer has one
(plugins/read_copy.py): with nothing in the ring since the checkpoint it is the checkpoint, bit for bit. The ring stays as
it is, because none of its rows is live afterwards; the convolution ring is addressed by position, so that its whole slot is
copied.
"""

from __future__ import annotations


def check_prefix(source: int, destination: int, folded: int, prefix_len: int) -> None:
    """Raises ValueError when the slots are the same or the prefix is already folded away."""
    if source == destination:
        raise ValueError("materialise needs two different slots")
    if prefix_len < folded:
        raise ValueError(f"the checkpoint of slot {source} already holds {folded} tokens, more than {prefix_len}")
