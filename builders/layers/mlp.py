"""Dense MLPs: SwiGLU with an optional trained limit, and squared ReLU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.parallel import Parameter, Segment, divide, row
from trtllm_replayssm.network.base import MlpActivation, Network, Tensor
from trtllm_replayssm.network.gated import GATED, Limit
from trtllm_replayssm.replay import ReplayConfig


@dataclass(frozen=True)
class Mlp(Layer):
    """swiglu: ``down(silu(gate(x)) * up(x))``, the rows of ``up`` being gate, then up; relu2: ``down(relu(up(x))^2)``.

    limit: of the factors, see network/gated.py, which has the other activations, too. gate_scale: of gate(x).
    """

    kind = "mlp"

    intermediate_size: int
    activation: MlpActivation
    limit: Limit = None
    bias: bool = False
    gate_scale: float = 1.0

    def parameters(self, hidden_size: int) -> dict[str, Parameter]:
        part = Segment(self.intermediate_size, self.intermediate_size)
        rows = (part, part) if self.activation in GATED else (part,)
        width = len(rows) * self.intermediate_size
        parameters = {
            "up.weight": Parameter((width, hidden_size), 0, rows),
            "down.weight": row(hidden_size, self.intermediate_size, self.intermediate_size),
        }
        if self.bias:
            parameters["up.bias"] = Parameter((width,), 0, rows, nonzero=False)
            parameters["down.bias"] = Parameter((hidden_size,), nonzero=False)
        return parameters

    def divided(self, tp_size: int) -> Mlp:
        return replace(self, intermediate_size=divide("MLP channels", self.intermediate_size, tp_size))

    def partial(self, net: Network, name: str, x: Tensor) -> Tensor:
        """The rank's share of the output, before the sum over ranks and the output bias."""
        hidden = net.linear(x, net.weight(f"{name}.up.weight"), net.weight(f"{name}.up.bias") if self.bias else None)
        if self.activation == "relu2":
            hidden = net.activation(hidden, "relu2")
        else:
            gate, up = net.split(hidden, (self.intermediate_size, self.intermediate_size))
            hidden = GATED[self.activation](net, net.scale(gate, self.gate_scale), up, self.limit)
        return net.linear(hidden, net.weight(f"{name}.down.weight"))

    def forward(self, net: Network, name: str, x: Tensor, replay: ReplayConfig) -> Tensor:
        out = net.all_reduce(self.partial(net, name, x))
        return net.add_bias(out, net.weight(f"{name}.down.bias")) if self.bias else out
