"""What a model may have in the place of its residual stream: hyper-connections, or attention over sums of layers.

Hyper-connections are several residual streams, which travel as one tensor ``[rows, T, count * D]``. A branch reads a mixture
of them ``[rows, T, D]`` and its output is written back to all of them, with weights that are computed from the streams
themselves. Attention residuals keep what earlier blocks of layers added up to, and every branch reads a mixture of that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from trtllm_replayssm.builders.described import Described
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.network.base import Network, Tensor


class Streams(Described, ABC):
    """What stands in the place of the one residual stream.

    branch_norms: whether branches and head have norms of their own behind what they read.
    """

    branch_norms: ClassVar[bool]

    @abstractmethod
    def branch_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Weights of one branch's mixing, by name; every rank holds them whole."""

    @abstractmethod
    def final_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """Weights of what brings the streams together for the head."""

    @abstractmethod
    def opened(self, net: Network, x: Tensor) -> Any:
        """The streams at the start, from the embedding ``[rows, T, D]``."""

    @abstractmethod
    def read(self, net: Network, name: str, streams: Any) -> tuple[Tensor, Any]:
        """What a branch reads ``[rows, T, D]``, and what ``written`` needs to know. name: prefix of the weights."""

    @abstractmethod
    def written(self, net: Network, streams: Any, output: Tensor, mixing: Any) -> Any:
        """The streams after a branch whose output is ``[rows, T, D]``."""

    @abstractmethod
    def closed(self, net: Network, name: str, streams: Any) -> Tensor:
        """What the head reads ``[rows, T, D]``. name: prefix of the weights."""


@dataclass(frozen=True)
class HyperConnections(Streams):
    """count: streams, which start as copies of the embedding. norm_epsilon: of the norm of the streams."""

    count: int
    norm_epsilon: float

    def final_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        return {}

    def opened(self, net: Network, x: Tensor) -> Tensor:
        return net.concat((x,) * self.count)

    def apart(self, net: Network, streams: Tensor) -> Tensor:
        """``[rows, T, count, D]``."""
        return net.unflatten(streams, (self.count, -1))

    def mean(self, net: Network, streams: Tensor) -> Tensor:
        return net.scale(net.flatten(net.sum(self.apart(net, streams), -2)), 1 / self.count)


@dataclass(frozen=True)
class SinkhornStreams(HyperConnections):
    """Manifold-constrained hyper-connections (Xie et al. 2026, "mHC"), as in GLM-5.3.

    With n streams S ``[n, D]`` and ``p = mix @ rms_norm(flatten(S)) + base``, cut into n, n and n x n numbers a, b, C:
    a branch reads ``sum_i (sigmoid(a_i) + epsilon) S_i``, and with its output y the streams become
    ``S_j = 2 sigmoid(b_j) y + sum_i M_ij S_i``, M being the doubly stochastic matrix that ``iterations`` of
    Sinkhorn-Knopp make of ``softmax(C)``. The head reads their mean. Weights are computed in float32.
    """

    kind = "sinkhorn_streams"
    branch_norms = True

    epsilon: float
    iterations: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.count, self.count, self.count * self.count

    def branch_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        width = sum(self.sizes)
        return {
            "mix.weight": Parameter((width, self.count * hidden_size), float32=True),
            "mix.bias": Parameter((width,), float32=True, nonzero=False),
        }

    def read(self, net: Network, name: str, streams: Tensor) -> tuple[Tensor, Any]:
        wide = net.cast(streams, "float32")
        normed = net.rms_norm(wide, None, self.norm_epsilon)
        mixed = net.linear(normed, net.weight(f"{name}.mix.weight"), net.weight(f"{name}.mix.bias"))
        before, after, across = net.split(mixed, self.sizes)
        before = net.offset(net.activation(before, "sigmoid"), self.epsilon)
        x = net.matmul(net.unflatten(before, (1, self.count)), self.apart(net, wide))
        after = net.scale(net.activation(after, "sigmoid"), 2.0)
        across = net.unflatten(across, (self.count, self.count))
        across = net.doubly_stochastic(across, self.iterations, self.epsilon)
        return net.cast_like(net.flatten(x), streams), (after, across)

    def written(self, net: Network, streams: Tensor, output: Tensor, mixing: Any) -> Tensor:
        after, across, output = (net.cast_like(part, streams) for part in (*mixing, output))
        kept = net.matmul(across, self.apart(net, streams), transpose_a=True)
        added = net.multiply(net.unflatten(after, (self.count, 1)), net.unflatten(output, (1, -1)))
        return net.flatten(net.add(kept, added))

    def closed(self, net: Network, name: str, streams: Tensor) -> Tensor:
        return self.mean(net, streams)


@dataclass(frozen=True)
class GatedStreams(HyperConnections):
    """Gated residual streams, as in Qwen3.8-Flash-Next.

    With n streams S and ``N = rms_norm(S)``, each stream by itself with zero-centred weights: a branch reads
    ``mean_i sigmoid(up @ silu(down @ N / n))_i N_i``, and its output y is added as ``S_i += 2 sigmoid(inject @ N / n)_i y``.
    The head reads such a mixture, too. rank: rows of ``down``.
    """

    kind = "gated_streams"
    branch_norms = False

    rank: int

    def final_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        width = self.count * hidden_size
        return {
            "norm.weight": Parameter((width,), nonzero=False),
            "down.weight": Parameter((self.rank, width)),
            "up.weight": Parameter((width, self.rank)),
        }

    def branch_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        inject = Parameter((self.count, self.count * hidden_size))
        return self.final_parameters(hidden_size) | {"inject.weight": inject}

    def mixture(self, net: Network, name: str, streams: Tensor) -> tuple[Tensor, Tensor]:
        """What is read ``[rows, T, D]``, and the normed streams."""
        normed = net.rms_norm(streams, net.weight(f"{name}.norm.weight"), self.norm_epsilon, True, groups=self.count)
        low = net.scale(net.linear(normed, net.weight(f"{name}.down.weight")), 1 / self.count)
        gate = net.linear(net.activation(low, "silu"), net.weight(f"{name}.up.weight"))
        return self.mean(net, net.multiply(net.activation(gate, "sigmoid"), normed)), normed

    def read(self, net: Network, name: str, streams: Tensor) -> tuple[Tensor, Any]:
        x, normed = self.mixture(net, name, streams)
        inject = net.scale(net.linear(normed, net.weight(f"{name}.inject.weight")), 1 / self.count)
        return x, net.scale(net.activation(inject, "sigmoid"), 2.0)

    def written(self, net: Network, streams: Tensor, output: Tensor, mixing: Any) -> Tensor:
        output = net.unflatten(net.cast_like(output, streams), (1, -1))
        return net.add(streams, net.flatten(net.multiply(net.unflatten(mixing, (self.count, 1)), output)))

    def closed(self, net: Network, name: str, streams: Tensor) -> Tensor:
        return self.mixture(net, name, streams)[0]


@dataclass(frozen=True)
class BlockSums:
    """State of AttentionResiduals. sums ``[rows, T, D]``: the embedding, then of each block the sum of its branches' outputs.

    branches: how many have written.
    """

    sums: tuple[Tensor, ...]
    branches: int = 0


@dataclass(frozen=True)
class AttentionResiduals(Streams):
    """Block attention residuals (Kimi team 2026, arXiv:2603.15031), as in Kimi-K3.

    The outputs of ``block`` branches in a row are added up; so is the embedding, as a block of its own. Of these sums b, those
    of earlier blocks and what its own block has so far, a branch and the head read
    ``sum_i softmax_i(query . rms_norm(b_i)) b_i``, each with a query of its own, in float32. norm_epsilon: of that norm.
    """

    kind = "attention_residuals"
    branch_norms = True

    block: int
    norm_epsilon: float

    def branch_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        """The first branch has only the embedding to read, so that its query has no effect."""
        return {"query.weight": Parameter((1, hidden_size), float32=True, nonzero=False)}

    def final_parameters(self, hidden_size: int) -> dict[str, Parameter]:
        return self.branch_parameters(hidden_size)

    def opened(self, net: Network, x: Tensor) -> BlockSums:
        return BlockSums((x,))

    def mixture(self, net: Network, name: str, sums: tuple[Tensor, ...]) -> Tensor:
        if len(sums) == 1:
            return sums[0]
        values = net.cast(net.unflatten(net.concat(sums), (len(sums), -1)), "float32")
        scores = net.linear(net.rms_norm(values, None, self.norm_epsilon), net.weight(f"{name}.query.weight"))
        shares = net.unflatten(net.softmax(net.flatten(scores)), (1, len(sums)))
        return net.cast_like(net.flatten(net.matmul(shares, values)), sums[0])

    def read(self, net: Network, name: str, streams: BlockSums) -> tuple[Tensor, None]:
        return self.mixture(net, name, streams.sums), None

    def written(self, net: Network, streams: BlockSums, output: Tensor, mixing: None) -> BlockSums:
        *earlier, latest = streams.sums
        output = net.cast_like(output, latest)
        opens = streams.branches % self.block == 0
        kept = (*streams.sums, output) if opens else (*earlier, net.add(latest, output))
        return BlockSums(kept, streams.branches + 1)

    def closed(self, net: Network, name: str, streams: BlockSums) -> Tensor:
        return self.mixture(net, name, streams.sums)
