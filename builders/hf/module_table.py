"""Values of single modules, by names and globs: the nearest entry decides."""

from __future__ import annotations

import fnmatch
import re
from typing import Generic, TypeVar

from trtllm_replayssm.builders.hf.module_names import ancestors, canonical, spellings
from trtllm_replayssm.errors import CheckpointError

Value = TypeVar("Value")


class ModuleTable(Generic[Value]):
    """A value for each of the modules that a table names, and for the modules below them."""

    def __init__(self, table: dict[str, Value], where: str) -> None:
        """Raises CheckpointError when two spellings of one module have different values."""
        self.values: dict[str, Value] = {}
        #: With the number of components that each glob has.
        self.globs: list[tuple[int, re.Pattern[str], Value]] = []
        for module, value in table.items():
            name = canonical(module)
            if "*" in module:
                self.globs.append((depth(name), re.compile(fnmatch.translate(name)), value))
            elif self.values.setdefault(name, value) != value:
                raise CheckpointError(f"{where} describes {module} twice, and differently")

    def named(self, module: str) -> bool:
        """Whether the table has the module itself."""
        return not self.values.keys().isdisjoint(spellings(module))

    def find(self, module: str) -> tuple[Value, ...]:
        """The value of the module, or else that of the entry around it which says most; empty when the table has none.

        The entry around it that says most is the one with most components; of two with as many, a block goes before a glob.
        """
        for spelling in spellings(module):
            if spelling in self.values:
                return (self.values[spelling],)
        name = canonical(module)
        around = [(depth(block), self.values[block]) for block in ancestors(name) if block in self.values]
        around += [(size, value) for size, glob, value in self.globs if glob.match(name) or glob.match(module)]
        return (max(around, key=lambda entry: entry[0])[1],) if around else ()


def depth(name: str) -> int:
    return name.count(".") + 1
