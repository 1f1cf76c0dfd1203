"""Mixers, attention kinds and MLP kinds that model families share.

A layer is a frozen dataclass of sizes with: ``parameters`` (its weights), ``divided`` (the same layer as one rank of a
tensor-parallel group sees it), ``pools`` (its per-slot state) and ``forward`` (the computation in the op vocabulary).
Nothing here knows the tensor names or config keys of a family.
"""
