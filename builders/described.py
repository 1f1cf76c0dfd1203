"""Parts of a model that config.json describes by their kind and fields: layers, indexers, residual streams."""

from __future__ import annotations

from typing import Any, ClassVar


class Described:
    """A frozen dataclass with a ``kind``, by which config.json names it."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            Described.kinds[cls.kind] = cls
