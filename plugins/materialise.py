"""``replayssm::materialise``: writes the state of a prefix of one slot into another slot.

The destination then stands for the first ``prefix_len`` tokens of the source with an empty ring
(``committed = folded = prefix_len``); the source is only read. The recurrent pools allow any
``folded <= prefix_len <= committed``. The convolution ring keeps the ``kernel - 1`` tokens before the last step's first
token and everything behind it, so call this after the commit of the step that crossed the boundary.
"""
