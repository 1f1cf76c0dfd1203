"""Mixture of experts: sigmoid router with group limit and correction bias, or softmax router; shared and latent parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide
from trtllm_replayssm.network.base import MlpActivation, Network, Tensor
from trtllm_replayssm.network.gated import GATED, Limit
from trtllm_replayssm.network.routing import Router, Routing
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Moe(Layer):
    """num_experts routed experts of intermediate_size, top_k of them per token.

    router: ``sigmoid`` chooses by score + correction bias, weighs by the score alone; ``softmax`` chooses and weighs by
    probability. With n_group > 1 only the topk_group groups whose two best scores add up to most are eligible.
    normalise divides the chosen weights by their sum; routed_scale multiplies them. limit: see Mlp.
    shared: an expert every token takes; shared_gate: scaled by a sigmoid of the input.
    latent_size: experts work on a projection of that width; latent_epsilon: of a norm of their sum in it, None for no norm.
    """

    kind = "moe"

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: MlpActivation
    router: Router
    normalise: bool = True
    routed_scale: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    limit: Limit = None
    shared: Mlp | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    latent_epsilon: float | None = None

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        width, inner, experts = self.latent_size or hidden_size, self.intermediate_size, self.num_experts
        part = Segment(inner, inner)
        rows = (part, part) if self.activation in GATED else (part,)
        parameters = {
            "router.weight": Parameter((experts, hidden_size), float32=True),
            "experts.up.weight": Parameter((experts, len(rows) * inner, width), 1, rows),
            "experts.down.weight": Parameter((experts, width, inner), 2, (part,)),
        }
        if self.router == "sigmoid":
            parameters["router.bias"] = Parameter((experts,), float32=True, nonzero=False)
        if self.latent_size is not None:
            parameters["latent_in.weight"] = Parameter((width, hidden_size))
            parameters["latent_out.weight"] = Parameter((hidden_size, width))
        if self.latent_epsilon is not None:
            parameters["latent_norm.weight"] = Parameter((width,))
        if self.shared is not None:
            parameters |= {f"shared.{n}": p for n, p in self.shared.parameters(hidden_size).items()}
        if self.shared_gate:
            parameters["shared_gate.weight"] = Parameter((1, hidden_size))
        return parameters

    def divided(self, tp_size: int) -> Moe:
        return replace(
            self,
            intermediate_size=divide("channels of an expert", self.intermediate_size, tp_size),
            shared=None if self.shared is None else self.shared.divided(tp_size),
        )

    @property
    def routing(self) -> Routing:
        choice = (self.top_k, self.router, self.n_group, self.topk_group)
        return Routing(*choice, self.normalise, self.routed_scale)

    def route(self, net: Network, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Indices (int32) and weights (float32) ``[rows, T, top_k]`` of the chosen experts."""
        logits = net.linear(net.cast(x, "float32"), net.weight(f"{name}.router.weight"))
        bias = net.weight(f"{name}.router.bias") if self.router == "sigmoid" else None
        return net.route(logits, bias, self.routing)

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        indices, weights = self.route(net, name, x)
        up, down = net.weight(f"{name}.experts.up.weight"), net.weight(f"{name}.experts.down.weight")
        routed = x if self.latent_size is None else net.linear(x, net.weight(f"{name}.latent_in.weight"))
        out = net.experts(routed, indices, weights, up, down, self.activation, self.limit)
        if self.latent_epsilon is not None:
            # The norm is of the sum over all ranks; what follows is then whole on each of them.
            out = net.rms_norm(net.all_reduce(out), net.weight(f"{name}.latent_norm.weight"), self.latent_epsilon)
            out = net.linear(out, net.weight(f"{name}.latent_out.weight"))
            return out if self.shared is None else net.add(out, net.all_reduce(self.shared_part(net, name, x)))
        if self.latent_size is not None:
            # Linear, so it may come before the sum over ranks, and one sum serves both branches.
            out = net.linear(out, net.weight(f"{name}.latent_out.weight"))
        return net.all_reduce(out if self.shared is None else net.add(out, self.shared_part(net, name, x)))

    def shared_part(self, net: Network, name: str, x: Tensor) -> Tensor:
        """The rank's share of the shared expert's output."""
        assert self.shared is not None
        shared = self.shared.partial(net, f"{name}.shared", x)
        if not self.shared_gate:
            return shared
        gate = net.activation(net.linear(x, net.weight(f"{name}.shared_gate.weight")), "sigmoid")
        return net.multiply(shared, gate)
