"""A checkpoint in our terms: which layers it has, and the tensors that each of them is made from."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from trtllm_replayssm.builders.families.base import Family, Source
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder, Mtp
from trtllm_replayssm.builders.streams import Streams
from trtllm_replayssm.errors import CheckpointError

#: Pairs of fields of which the first is a multiple of the second, by kind of layer.
MULTIPLES = {
    "mamba2": ("num_heads", "n_groups"),
    "gated_delta": ("num_value_heads", "num_key_heads"),
    "attention": ("num_heads", "num_kv_heads"),
    "moe": ("num_experts", "n_group"),
}
#: Sources of a layer's parameters, by the parameter's name in the layer.
Sources = dict[str, Source]


@dataclass(frozen=True)
class Branch:
    """One residual branch: its norm's tensor, its layer, and the layer's sources.

    norm: None between streams that need none. streams: sources of its mixing of the residual streams.
    """

    norm: str | None
    layer: Layer
    sources: Sources
    streams: Sources = field(default_factory=dict)


@dataclass(frozen=True)
class MtpBlueprint:
    """The multi-token prediction head: tensors of its norms and projection, and its branches."""

    norm_embedding: str
    norm_hidden: str
    proj: str
    final_norm: str
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Blueprint:
    """The whole model. embedding, final_norm and head are tensor names; the other fields are HybridDecoder's.

    final_norm: None where the streams are brought together without one. stream_sources: of what does that.
    """

    vocab_size: int
    hidden_size: int
    norm_epsilon: float
    branches: tuple[Branch, ...]
    embedding: str
    final_norm: str | None
    head: str
    tie_embeddings: bool = False
    norm_zero_centred: bool = False
    residual_float32: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    streams: Streams | None = None
    stream_sources: Sources = field(default_factory=dict)
    mtp: MtpBlueprint | None = None
    #: Beginnings of tensor names that are left out on purpose, with the reason.
    dropped: dict[str, str] = field(default_factory=dict)


class BlueprintFamily(Family):
    """A family that reads its config once, in ``read``, and answers everything from the blueprint it made.

    aliases: spellings of config keys that transformers or an older release writes, with the spelling that ``read`` uses.
    """

    aliases: dict[str, str] = {}

    def __init__(self, config: HfConfig, tensor_shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__(HfConfig(renamed(config, self.aliases), config.where), tensor_shapes)
        self.blueprint = self.read()
        self.config.finish()
        self.check_layers()

    @abstractmethod
    def read(self) -> Blueprint:
        """The model that config and tensor names describe; every key of the config is read or ignored on purpose."""

    def check_layers(self) -> None:
        """Raises CheckpointError for head, group and expert counts that no tensor shape would contradict."""
        parts = (part for branch in self.blueprint.branches for _, part in branch.layer.parts(""))
        for layer in dict.fromkeys(parts):
            if layer.kind in MULTIPLES:
                many, few = ((field, getattr(layer, field)) for field in MULTIPLES[layer.kind])
                if many[1] % few[1]:
                    raise CheckpointError(
                        f"{self.config.where}: {layer.kind} layers have {many[1]} {many[0]}, which is no multiple of"
                        f" {few[1]} {few[0]}"
                    )
            if isinstance(layer, Moe) and layer.topk_group > layer.n_group:
                raise CheckpointError(
                    f"{self.config.where}: {layer.topk_group} groups of experts cannot be chosen from {layer.n_group}"
                )
            if isinstance(layer, Moe) and layer.top_k > layer.num_experts // layer.n_group * layer.topk_group:
                raise CheckpointError(
                    f"{self.config.where}: {layer.top_k} experts a token cannot be chosen from {layer.topk_group} of"
                    f" {layer.n_group} groups of {layer.num_experts} experts"
                )

    def decoder(self) -> HybridDecoder:
        b = self.blueprint
        return HybridDecoder(
            vocab_size=b.vocab_size,
            hidden_size=b.hidden_size,
            norm_epsilon=b.norm_epsilon,
            layers=tuple(branch.layer for branch in b.branches),
            norm_zero_centred=b.norm_zero_centred,
            tie_embeddings=b.tie_embeddings,
            residual_float32=b.residual_float32,
            embedding_scale=b.embedding_scale,
            logits_scale=b.logits_scale,
            streams=b.streams,
            mtp=None if b.mtp is None else Mtp(tuple(branch.layer for branch in b.mtp.branches)),
        )

    def sources(self, decoder: HybridDecoder) -> dict[str, Source]:
        b = self.blueprint
        named = {"transformer.vocab_embedding.weight": Source((b.embedding,))}
        named |= branch_sources("transformer.layers", b.branches)
        named |= {f"transformer.streams.{name}": source for name, source in b.stream_sources.items()}
        if b.final_norm is not None:
            named["transformer.ln_f.weight"] = Source((b.final_norm,))
        if not b.tie_embeddings:
            named["lm_head.weight"] = Source((b.head,))
        if b.mtp is not None:
            named |= branch_sources("mtp.layers", b.mtp.branches)
            tensors = {"norm_embedding": b.mtp.norm_embedding, "norm_hidden": b.mtp.norm_hidden}
            tensors |= {"ln_f": b.mtp.final_norm, "proj": b.mtp.proj}
            named |= {f"mtp.{ours}.weight": Source((theirs,)) for ours, theirs in tensors.items()}
        return named

    def dropped(self, name: str) -> str | None:
        reasons = self.blueprint.dropped.items()
        return next((reason for beginning, reason in reasons if name.startswith(beginning)), None)

    def usual_blueprint(
        self,
        branches: list[Branch],
        epsilon: float,
        final_norm: str = "model.norm.weight",
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
    ) -> Blueprint:
        """A model whose ends are ``model.embed_tokens``, a final norm and ``lm_head``."""
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        return Blueprint(
            vocab_size=self.vocabulary(embedding),
            hidden_size=self.config.positive("hidden_size"),
            norm_epsilon=epsilon,
            branches=tuple(branches),
            embedding=embedding,
            final_norm=final_norm,
            head=head,
            tie_embeddings=self.tied(head),
            embedding_scale=embedding_scale,
            logits_scale=logits_scale,
        )

    # ---- what the tensors tell ---------------------------------------------------------------------------------------

    def pick(self, *names: str) -> str:
        """The first of several spellings that the checkpoint holds; the first one of a bare config."""
        return next((name for name in names if name in self.tensor_shapes), names[0])

    def holds(self, beginning: str) -> bool:
        """Whether any tensor's name begins so."""
        return any(name.startswith(beginning) for name in self.tensor_shapes)

    def vocabulary(self, embedding: str) -> int:
        """Rows of the embedding. The file is the truth: published vocabularies are padded beyond their tokens."""
        stated = self.config.positive("vocab_size")
        rows = self.tensor_shapes.get(embedding, (stated,))[0]
        if rows < stated:
            raise CheckpointError(f"{embedding} has {rows} rows, but {self.config.where} has a vocab_size of {stated}")
        if rows > stated:
            self.notes.append(f"the embedding has {rows} rows for a vocabulary of {stated}; the rest are padding")
        return rows

    def tied(self, head: str) -> bool:
        """Whether the head is the embedding. A config that does not say so is judged by the presence of the head."""
        if self.tensor_shapes and "tie_word_embeddings" not in self.config:
            return head not in self.tensor_shapes
        return self.config.flag("tie_word_embeddings", False)

    def wants_mtp(self, stated: int | None, beginning: str) -> bool:
        """Whether to build the MTP layers: the tensors decide, the config decides for a bare config.json.

        stated: MTP layers according to the config, None where the family's configs never say.
        beginning: of the names of the MTP tensors.
        """
        if not self.tensor_shapes:
            return bool(stated)
        present = self.holds(beginning)
        if stated and not present:
            self.notes.append(
                "config.json announces MTP layers, but the checkpoint has no tensors for them: MTP is off"
            )
        if present and stated == 0:
            self.notes.append("the checkpoint has MTP tensors that config.json does not announce: they are kept")
        return present


def branch_sources(prefix: str, branches: tuple[Branch, ...]) -> dict[str, Source]:
    named = {}
    for i, branch in enumerate(branches):
        if branch.norm is not None:
            named[f"{prefix}.{i}.norm.weight"] = Source((branch.norm,))
        named |= {f"{prefix}.{i}.streams.{name}": source for name, source in branch.streams.items()}
        named |= {f"{prefix}.{i}.{branch.layer.kind}.{name}": source for name, source in branch.sources.items()}
    return named


def renamed(config: HfConfig, aliases: dict[str, str]) -> dict[str, Any]:
    """The config's values with aliases replaced. Raises CheckpointError when both spellings are there and differ."""
    values = dict(config.values)
    for alias, name in aliases.items():
        value = values.pop(alias, None)
        if value is None:
            continue
        if values.get(name) not in (None, value):
            raise config.fail(name, f"is {values[name]!r}, but {alias}, another word for it, is {value!r}")
        values[name] = value
    return values
