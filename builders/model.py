"""The hybrid decoder: a list of residual branches between an embedding and a head, and its description in config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from trtllm_replayssm.builders.layers import (  # noqa: F401  (kinds)
    attention,
    gated_delta,
    kda,
    mamba2,
    mla,
    mlp,
    moe,
    ngram,
    side_by_side,
)
from trtllm_replayssm.builders.layers.base import Layer, StateOptions, StreamLayer, layer_from_dict, to_dict
from trtllm_replayssm.builders.parallel import Parameter, Segment
from trtllm_replayssm.builders.streams import Streams
from trtllm_replayssm.counts import check_count
from trtllm_replayssm.network.base import Network, Tensor
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction head: ``proj(concat(norm_e(embedding), norm_h(hidden)))``, its branches, a final norm.

    hidden is the decoder's output after its final norm; embedding and head are the decoder's own.
    """

    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class HybridDecoder:
    """Everything that determines the computation; weights and state apart.

    vocab_size: rows of the embedding. hidden_size: width D. norm_epsilon, norm_zero_centred: of every branch's input norm
    and the final norm. tie_embeddings: the head is the embedding. residual_float32: the residual stream is float32.
    layers: residual branches in order; a transformer block is two of them. embedding_scale, logits_scale: factors of both
    ends. streams: hyper-connections in the place of the one residual stream; an MTP head has none.
    """

    vocab_size: int
    hidden_size: int
    norm_epsilon: float
    layers: tuple[Layer, ...]
    norm_zero_centred: bool = False
    tie_embeddings: bool = False
    residual_float32: bool = False
    mtp: Mtp | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    streams: Streams | None = None

    # ---- weights -----------------------------------------------------------------------------------------------------

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the head over all ranks: vocab_size rounded up to a multiple of tp_size with zero rows."""
        return -(-self.vocab_size // tp_size) * tp_size

    def norm(self) -> Parameter:
        return Parameter((self.hidden_size,), nonzero=not self.norm_zero_centred)

    def parameters(self, tp_size: int = 1) -> dict[str, Parameter]:
        """Every weight of the checkpoint by name, MTP included."""
        padded = self.padded_vocab(tp_size)
        head = Parameter((padded, self.hidden_size), 0, (Segment(padded, tp_size),))
        named = {"transformer.vocab_embedding.weight": Parameter((self.vocab_size, self.hidden_size))}
        named |= self.branch_parameters("transformer.layers", self.layers, self.streams)
        if self.streams is None or self.streams.branch_norms:
            named["transformer.ln_f.weight"] = self.norm()
        if self.streams is not None:
            named |= prefixed("transformer.streams.", self.streams.final_parameters(self.hidden_size))
        # A tied head is stored once more only where ranks need their own rows of it.
        if not self.tie_embeddings or tp_size > 1:
            named["lm_head.weight"] = head
        if self.mtp is not None:
            named |= self.branch_parameters("mtp.layers", self.mtp.layers)
            for name in ("norm_embedding", "norm_hidden", "ln_f"):
                named[f"mtp.{name}.weight"] = self.norm()
            named["mtp.proj.weight"] = Parameter((self.hidden_size, 2 * self.hidden_size))
        return named

    def branch_parameters(
        self, prefix: str, layers: tuple[Layer, ...], streams: Streams | None = None
    ) -> dict[str, Parameter]:
        named: dict[str, Parameter] = {}
        for i, layer in enumerate(layers):
            named |= prefixed(f"{prefix}.{i}.", self.branch(layer, streams))
        return named

    def branch(self, layer: Layer, streams: Streams | None) -> dict[str, Parameter]:
        """Weights of a layer, of its norm, and of its mixing of the residual streams."""
        named = prefixed(f"{layer.kind}.", layer.parameters(self.hidden_size))
        if isinstance(layer, StreamLayer):
            return named
        if streams is not None:
            named |= prefixed("streams.", streams.branch_parameters(self.hidden_size))
        return {"norm.weight": self.norm()} | named if streams is None or streams.branch_norms else named

    # ---- state -------------------------------------------------------------------------------------------------------

    def divided(self, tp_size: int) -> HybridDecoder:
        """The decoder as one rank sees it. Raises UserError when a layer cannot be divided, or for no ranks at all."""
        check_count("tp_size", tp_size)
        mtp = None if self.mtp is None else Mtp(tuple(layer.divided(tp_size) for layer in self.mtp.layers))
        return replace(self, layers=tuple(layer.divided(tp_size) for layer in self.layers), mtp=mtp)

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Branches with the prefix of their weights and pools."""
        for i, layer in enumerate(self.layers):
            yield f"transformer.layers.{i}.{layer.kind}", layer

    def named_mtp_layers(self) -> Iterator[tuple[str, Layer]]:
        """Branches of the MTP head with the prefix of their weights and pools; none without one."""
        for i, layer in enumerate(() if self.mtp is None else self.mtp.layers):
            yield f"mtp.layers.{i}.{layer.kind}", layer

    def named_parts(self) -> Iterator[tuple[str, Layer]]:
        """Like named_layers, with the layers inside of branches that join several."""
        for name, layer in self.named_layers():
            yield from layer.parts(name)

    def pools(self, options: StateOptions) -> dict[str, Pool]:
        """Every state tensor that a step of one rank needs (call on a divided decoder), by name."""
        return layer_pools(self.named_layers(), options)

    def mtp_pools(self, options: StateOptions) -> dict[str, Pool]:
        """State tensors of the MTP head; none where the engine takes no drafts."""
        return layer_pools(self.named_mtp_layers(), options) if options.replay.max_draft_len else {}

    # ---- computation -------------------------------------------------------------------------------------------------

    def forward(self, net: Network, token_ids: Tensor, replay: ReplayConfig, last_only: bool = False) -> Tensor:
        """Logits float32 ``[rows, T, vocab_size]`` of a divided decoder; ``[rows, 1, vocab_size]`` with last_only.

        token_ids: int32 ``[rows, T]``. last_only: only each row's last valid token, as after a prefill chunk.
        """
        return self.logits(net, self.hidden(net, token_ids, replay), last_only)

    def hidden(self, net: Network, token_ids: Tensor, replay: ReplayConfig) -> Tensor:
        """What the head reads: the output of the final norm ``[rows, T, hidden_size]``, in the activations' dtype."""
        x = self.residual(net, self.embedding(net, token_ids))
        if self.streams is None:
            x = self.through(net, self.named_layers(), x, replay)
        else:
            x = self.through_streams(net, self.streams, x, token_ids, replay)
            if not self.streams.branch_norms:
                return net.cast(x, "activation")
        return net.cast(self.normed(net, "transformer.ln_f.weight", x), "activation")

    def logits(self, net: Network, hidden: Tensor, last_only: bool = False) -> Tensor:
        """Logits float32 ``[rows, T or 1, vocab_size]`` from the output of a final norm ``[rows, T, hidden_size]``."""
        x = net.select_last(hidden) if last_only else hidden
        logits = net.all_gather(net.linear(x, net.weight(self.head_name(net))))
        return net.scale(net.cast(net.slice_last(logits, self.vocab_size), "float32"), self.logits_scale)

    def predicted(self, net: Network, token_ids: Tensor, hidden: Tensor, replay: ReplayConfig) -> Tensor:
        """The MTP head's own ``hidden`` at positions p: what tells the token at p + 2, and feeds the head at p + 1.

        token_ids: int32 ``[rows, T]``, the tokens at p + 1. hidden: ``[rows, T, hidden_size]``, the decoder's at p, or the
        head's own where the decoder has not been. The result looks like ``hidden``; ``logits`` turns it into logits.
        """
        embedding = self.normed(net, "mtp.norm_embedding.weight", self.embedding(net, token_ids))
        parts = net.concat((embedding, self.normed(net, "mtp.norm_hidden.weight", hidden)))
        x = self.residual(net, net.linear(parts, net.weight("mtp.proj.weight")))
        x = self.through(net, self.named_mtp_layers(), x, replay)
        return net.cast(self.normed(net, "mtp.ln_f.weight", x), "activation")

    def embedding(self, net: Network, token_ids: Tensor) -> Tensor:
        table = net.weight("transformer.vocab_embedding.weight")
        return net.scale(net.embedding(token_ids, table), self.embedding_scale)

    def residual(self, net: Network, x: Tensor) -> Tensor:
        """``x`` in the dtype of the residual stream."""
        return net.cast(x, "float32") if self.residual_float32 else x

    def through(self, net: Network, layers: Iterable[tuple[str, Layer]], x: Tensor, replay: ReplayConfig) -> Tensor:
        """The residual stream after these branches."""
        for name, layer in layers:
            norm = name.rpartition(".")[0] + ".norm.weight"
            y = x if layer.norm_after else self.normed(net, norm, x)
            y = layer.scaled(net, name, net.cast(y, "activation"), replay)
            x = net.add(x, net.cast_like(self.normed(net, norm, y) if layer.norm_after else y, x))
        return x

    def through_streams(
        self, net: Network, streams: Streams, x: Tensor, token_ids: Tensor, replay: ReplayConfig
    ) -> Tensor:
        """``through`` all branches with hyper-connections, from embedding to what the final norm reads."""
        x = streams.opened(net, x)
        for name, layer in self.named_layers():
            branch = name.rpartition(".")[0]
            if isinstance(layer, StreamLayer):
                x = net.add(x, net.cast_like(layer.added(net, name, x, token_ids, replay), x))
                continue
            y, mixing = streams.read(net, f"{branch}.streams", x)
            if streams.branch_norms:
                y = self.normed(net, f"{branch}.norm.weight", y)
            y = layer.scaled(net, name, net.cast(y, "activation"), replay)
            x = streams.written(net, x, y, mixing)
        return streams.closed(net, "transformer.streams", x)

    def normed(self, net: Network, weight: str, x: Tensor) -> Tensor:
        return net.rms_norm(x, net.weight(weight), self.norm_epsilon, self.norm_zero_centred)

    def head_name(self, net: Network) -> str:
        tied_here = self.tie_embeddings and net.tp_size == 1
        return "transformer.vocab_embedding.weight" if tied_here else "lm_head.weight"

    # ---- config.json -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        data = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "norm_epsilon": self.norm_epsilon,
            "norm_zero_centred": self.norm_zero_centred,
            "tie_embeddings": self.tie_embeddings,
            "residual_float32": self.residual_float32,
            "embedding_scale": self.embedding_scale,
            "logits_scale": self.logits_scale,
            "streams": to_dict(self.streams),
            "layers": [to_dict(layer) for layer in self.layers],
        }
        return data | {"mtp": None if self.mtp is None else [to_dict(layer) for layer in self.mtp.layers]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HybridDecoder:
        """The decoder that ``to_dict`` wrote. Raises KeyError, TypeError, AttributeError or ValueError for another one."""
        values = {**data}
        values["layers"] = tuple(layer_from_dict(layer) for layer in data["layers"])
        if data.get("streams") is not None:
            values["streams"] = layer_from_dict(data["streams"])
        if data.get("mtp") is not None:
            values["mtp"] = Mtp(tuple(layer_from_dict(layer) for layer in data["mtp"]))
        return cls(**values)


def prefixed(prefix: str, named: dict[str, Parameter]) -> dict[str, Parameter]:
    return {prefix + name: parameter for name, parameter in named.items()}


def layer_pools(layers: Iterable[tuple[str, Layer]], options: StateOptions) -> dict[str, Pool]:
    return {f"{name}.{pool}": p for name, layer in layers for pool, p in layer.pools(options).items()}
