"""Names of modules as quantisation descriptions write them, matched with the names that the tensors have.

A description may carry a wrapper's prefix that the tensors lack, or lack one that they have; it may name the projection
that a server fuses from several; it may name a whole block, or only the end of a name.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from trtllm_replayssm.errors import CheckpointError

#: First components under which wrappers and hub spellings put the language model.
WRAPPERS = frozenset({"model", "language_model", "backbone"})
#: The prefixes that they form, for expressions, which cannot be taken apart.
PREFIXES = ("", "model.", "backbone.", "language_model.", "model.language_model.", "language_model.model.")
#: Last components, and the name of the projection that holds them where they are fused.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
#: Beginnings of groups that look ahead or back. Such an expression may say what a name is not, which a prefix that the name
#: does not have can make true.
LOOKAROUND = ("(?=", "(?!", "(?<=", "(?<!")


def canonical(name: str) -> str:
    """The name without wrappers before it: ``layers.0.mlp`` for ``model.language_model.layers.0.mlp``."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part not in WRAPPERS), len(parts) - 1)
    return ".".join(parts[first:])


def spellings(module: str) -> tuple[str, ...]:
    """The canonical name, and that of the fused projection that the module would be part of."""
    name = canonical(module)
    parent, dot, leaf = name.rpartition(".")
    return (name, parent + dot + FUSED[leaf]) if leaf in FUSED else (name,)


def ancestors(name: str) -> Iterable[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


class ModulePatterns:
    """The modules that a list names: whole names, blocks, ends of names, ``*`` globs and ``re:`` expressions.

    A name with a ``layers`` component stands for that module and all below it. Any other plain name, such as ``lm_head``,
    ``b_proj`` or ``5.attention.g_proj``, stands for every module in whose name its components follow one another:
    ``b_proj`` is not ``kv_b_proj``. Plain names may be those of fused projections; globs and expressions mean what they say.
    """

    def __init__(self, patterns: Iterable[str], where: str) -> None:
        """Raises CheckpointError for an expression that is none."""
        self.whole: set[str] = set()
        self.loose: set[str] = set()
        self.expressions: list[re.Pattern[str]] = []
        globs = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    self.expressions.append(re.compile(pattern[3:]))
                except re.error as error:
                    raise CheckpointError(f"{where}: {pattern} is no regular expression: {error}") from None
            elif "*" in pattern or "?" in pattern:
                globs.append(fnmatch.translate(canonical(pattern)))
            elif "layers" in pattern.split("."):
                self.whole.add(canonical(pattern))
            else:
                self.loose.add(canonical(pattern))
        self.globs = re.compile("|".join(globs)) if globs else None

    def match(self, module: str) -> bool:
        name = canonical(module)
        if any(self.names(spelling) for spelling in spellings(module)):
            return True
        if self.globs and (self.globs.match(name) or self.globs.match(module)):
            return True
        return any(expression_matches(expression, module, name) for expression in self.expressions)

    def names(self, name: str) -> bool:
        """Whether a plain name of the list stands for this one."""
        if not self.whole.isdisjoint(ancestors(name)):
            return True
        return bool(self.loose) and any(not self.loose.isdisjoint(starts) for starts in runs(name))


def expression_matches(expression: re.Pattern[str], module: str, name: str) -> bool:
    """Whether it matches the module's own name, or its canonical ``name`` under a wrapper that the description may have."""
    if expression.match(module):
        return True
    if any(group in expression.pattern for group in LOOKAROUND):
        return False
    return any(expression.match(prefix + name) for prefix in PREFIXES)


def runs(name: str) -> Iterable[Iterable[str]]:
    """The ancestors of the name, of the name without its first component, and so on: every run of components."""
    while name:
        yield ancestors(name)
        name = name.partition(".")[2]
