"""Which experts a token takes: one formula for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trtllm_replayssm.network.base import Network, Tensor

Router = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class Routing:
    """router: ``sigmoid`` chooses by score + bias and weighs by the score; ``softmax`` does both by probability.

    With n_group > 1 a sigmoid router chooses among the topk_group groups whose two best choices add up to most. normalise
    divides the weights of the top_k chosen by their sum; scale multiplies them.
    """

    top_k: int
    router: Router
    n_group: int = 1
    topk_group: int = 1
    normalise: bool = True
    scale: float = 1.0


def composed_route(net: Network, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """``Network.route`` of smaller ops."""
    if routing.router == "softmax":
        weights, indices = net.top_k(net.softmax(logits), routing.top_k)
    else:
        choice = scores = net.activation(logits, "sigmoid")
        if bias is not None:
            choice = net.add_bias(scores, bias)
        if routing.n_group > 1:
            best_two, _ = net.top_k(net.unflatten(choice, (routing.n_group, -1)), 2)
            _, groups = net.top_k(net.flatten(net.sum(best_two)), routing.topk_group)
            choice = net.mask_groups(choice, groups, routing.n_group)
        _, indices = net.top_k(choice, routing.top_k)
        weights = net.gather(scores, indices)
    if routing.normalise:
        weights = net.divide(weights, net.sum(weights))
    return indices, net.scale(weights, routing.scale)
