"""The modules that a group of a compressed-tensors description is for: by their names, or by the classes that they are of."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.builders.hf.module_names import ModulePatterns

#: Classes of modules with a weight that is a matrix. Which of them a module is of, its name tells.
LINEAR, EMBEDDING = "Linear", "Embedding"
CLASSES = (LINEAR, EMBEDDING)
#: Last components of the names of embeddings, over all families.
EMBEDDINGS = frozenset({"embed_tokens", "embeddings", "embedding", "word_embeddings", "wte", "ngram_embedding"})


@dataclass(frozen=True)
class Targets:
    """patterns: names of modules. classes: names of classes."""

    patterns: ModulePatterns
    classes: frozenset[str]

    def name(self, module: str) -> bool:
        return self.patterns.match(module)

    def class_of(self, module: str) -> bool:
        return (EMBEDDING if is_embedding(module) else LINEAR) in self.classes


def is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in EMBEDDINGS


def is_class(target: str) -> bool:
    """Whether a target is written as Python writes classes, not as modules are named."""
    return target.isidentifier() and target[0].isupper()
