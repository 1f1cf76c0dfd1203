"""What a checkpoint says of its quantisation: the format of every module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.hf.formats.base import Format
from trtllm_replayssm.builders.hf.module_names import ModulePatterns
from trtllm_replayssm.builders.hf.module_table import ModuleTable
from trtllm_replayssm.builders.hf.targets import Targets
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

BF16_HINT = "use the BF16 checkpoint"


@dataclass(frozen=True)
class Description:
    """One of a checkpoint's descriptions. where: file and key. name: for messages.

    table: formats of single modules, None for full precision; it wins over all else. ignored: modules in full precision.
    groups: formats of the modules that targets name, the first that matches; None matches every module. needs_table: says
    nothing of its own, only that there is a table.
    """

    where: str
    name: str
    table: ModuleTable[Format | None]
    ignored: ModulePatterns
    groups: tuple[tuple[Targets | None, Format], ...] = ()
    needs_table: bool = False

    @property
    def claims(self) -> bool:
        """Whether any weight is quantised; a description may be of the KV cache alone."""
        return bool(self.groups or self.table.values or self.table.globs)

    def format(self, module: str) -> Format | None:
        """How the module's weight is stored; None in full precision."""
        listed = self.table.find(module)
        if listed:
            return listed[0]
        if self.ignored.match(module):
            return None
        # What names modules goes before what names classes.
        named = (format for targets, format in self.groups if targets is not None and targets.name(module))
        general = (format for targets, format in self.groups if targets is None or targets.class_of(module))
        return next(named, None) or next(general, None)


def agreed_format(descriptions: list[Description], module: str) -> Format | None:
    """The module's format. Tables of modules win over general statements.

    Raises CheckpointError, naming the module, when descriptions of the same rank differ.
    """
    listing = [description for description in descriptions if description.table.find(module)] or descriptions
    formats = [description.format(module) for description in listing]
    for description, format in zip(listing, formats):
        if format != formats[0]:
            raise CheckpointError(
                f"{listing[0].where} and {description.where} disagree about {module}: {label(formats[0])}, {label(format)}",
                "remove the one that does not belong to the checkpoint",
            )
    return formats[0] if formats else None


def label(format: Format | None) -> str:
    return format.label if format else "not quantised"


# ---- for the readers of descriptions ---------------------------------------------------------------------------------


def refused(where: str, what: str, known: Iterable[str]) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where}: {what} is not read", f"{BF16_HINT}; read are {', '.join(known)}")


def names(config: HfConfig, key: str) -> list[str]:
    """A list of names, empty where there is none."""
    value = config.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise config.fail(key, f"is {value!r}; expected a list of module names")
    return value


def block(config: HfConfig, key: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    value: Any = config.get(key)
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise config.fail(key, f"is {value!r}; expected rows and columns")
    return value[0], value[1]
