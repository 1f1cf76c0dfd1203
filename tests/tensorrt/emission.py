"""Networks of small decoders, and their step by step comparison with the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from interpreter import Interpreter
from torch import Tensor

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.compat import TensorRT, load_tensorrt
from trtllm_replayssm.network.base import Network
from trtllm_replayssm.network.tensorrt.backend import slot_elements
from trtllm_replayssm.network.tensorrt.build import EmittedStep, StepModel, StepSizes, build_plan, emit_step
from trtllm_replayssm.network.tensorrt.emitter import Emitter
from trtllm_replayssm.network.tensorrt.options import PlanOptions
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins, PluginOutput
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.reference import conv, delta_rule, mamba2
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.replay import ReplayConfig

REPLAY = ReplayConfig(window=8, max_draft_len=3)
#: 125 + 3 drafts: cache rows whose bytes TensorRT can bind.
MAX_SEQ_LEN = 125


@cache
def quiet(trt: Any) -> Any:
    """One log for all builders of the process: TensorRT keeps what it is given first, however long that builder lives."""
    return trt.Logger(trt.Logger.ERROR)


def rtx() -> TensorRT:
    return load_tensorrt(("tensorrt_rtx",))


def without(tensorrt: TensorRT, **features: bool) -> TensorRT:
    """The same TensorRT as if it lacked some features, like an earlier version."""
    return replace(tensorrt, features=replace(tensorrt.features, **features))


def make_weights(decoder: HybridDecoder, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5).to(torch.float32 if p.float32 else dtype)
        for name, p in decoder.parameters().items()
    }


def step_model(decoder: HybridDecoder, options: StateOptions) -> StepModel:
    def forward(net: Network, token_ids: Any, hidden: Any) -> dict[str, Any]:
        return {"logits": decoder.forward(net, token_ids, options.replay, last_only=True)}

    return StepModel(forward, decoder.pools(options), options.activation, options.replay.window)


def prediction_model(decoder: HybridDecoder, options: StateOptions) -> StepModel:
    """The decoder's MTP head."""

    def forward(net: Network, token_ids: Any, hidden: Any) -> dict[str, Any]:
        predicted = decoder.predicted(net, token_ids, hidden, options.replay)
        return {"logits": decoder.logits(net, predicted, last_only=True), "hidden_states": predicted}

    pools = decoder.mtp_pools(options)
    return StepModel(forward, pools, options.activation, options.replay.window, decoder.hidden_size)


@dataclass
class Emission:
    """A cut network in TensorRT's own objects, with the builder that owns it and the plugin layers it was cut at."""

    tensorrt: TensorRT
    builder: Any
    step: EmittedStep
    plugins: RecordedPlugins
    decoder: HybridDecoder
    weights: Mapping[str, Tensor]
    options: StateOptions

    @classmethod
    def of(
        cls,
        decoder: HybridDecoder,
        dtype: torch.dtype = torch.float32,
        tensorrt: TensorRT | None = None,
        replay: ReplayConfig = REPLAY,
        weights: Mapping[str, Tensor] | None = None,
        capability: tuple[int, int] | None = None,
        max_seq_len: int = MAX_SEQ_LEN,
        whole: bool = False,
        tp_size: int = 1,
        model: Callable[[HybridDecoder, StateOptions], StepModel] = step_model,
    ) -> Emission:
        tensorrt = tensorrt or rtx()
        builder = tensorrt.module.Builder(quiet(tensorrt.module))
        network, plugins = tensorrt.create_network(builder), RecordedPlugins(whole)
        options = StateOptions(replay, dtype, max_seq_len)
        weights = weights or make_weights(decoder, dtype)
        step = emit_step(tensorrt, network, model(decoder, options), weights, plugins, tp_size, capability)
        return cls(tensorrt, builder, step, plugins, decoder, weights, options)

    def plan(self, sizes: StepSizes, capability: tuple[int, int] = (8, 9), **options: Any) -> bytes:
        """The serialised engine, built for a GPU that need not be there."""
        return bytes(build_plan(self.step, self.builder, sizes, PlanOptions(capability, **options)))


class RecordedPlugins(CutPlugins):
    """Cuts like CutPlugins and remembers each layer, so that its reference can stand in for it.

    whole: put ``advance`` in, too, as where plugin layers exist.
    """

    def __init__(self, whole: bool = False) -> None:
        self.with_advance = whole
        self.calls: list[tuple[str, Any, Mapping[str, Any], tuple[Any, ...]]] = []

    def __call__(
        self, emitter: Emitter, kind: str, attributes: Any, inputs: Mapping[str, Any], outputs: tuple[PluginOutput, ...]
    ) -> tuple[Any, ...]:
        results = super().__call__(emitter, kind, attributes, inputs, outputs)
        self.calls.append((kind, attributes, inputs, results))
        return results


class Run:
    """One request per row, run by the torch backend and by the interpreted network at the same time."""

    def __init__(self, emission: Emission, rows: int) -> None:
        self.emission = emission
        self.pools = emission.decoder.pools(emission.options)
        self.cursors = torch.zeros(rows, CURSOR_WORDS, dtype=torch.int32)
        self.mine = {name: bound_pool(pool, rows) for name, pool in self.pools.items()}
        self.theirs = {name: bound_pool(pool, rows) for name, pool in self.pools.items()}

    def compare(
        self,
        ids: Tensor,
        mode: RowMode,
        accepted: int,
        slots: list[int] | None = None,
        lengths: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits of every token ``[rows, T, vocab]`` from both, torch's first; commits ``accepted`` tokens of live rows."""
        plan = self.plan(ids, mode, slots, lengths)
        expected, got = self.by_torch(ids, plan), self.by_network(ids, plan)
        for slot in plan["slot_ids"].tolist():
            if slot >= 0:
                self.cursors[slot, Cursor.COMMITTED] += accepted
        return expected, got

    def plan(
        self, ids: Tensor, mode: RowMode, slots: list[int] | None = None, lengths: list[int] | None = None
    ) -> dict[str, Tensor]:
        """The rows' inputs of ``advance``, with the cursors before it, and the step info that it makes of them."""
        rows, tokens = ids.shape
        plan = {
            "cursors": self.cursors.clone(),
            "slot_ids": torch.tensor(slots or range(rows), dtype=torch.int32),
            "query_lens": torch.tensor(lengths or [tokens] * rows, dtype=torch.int32),
            "modes": torch.full((rows,), mode, dtype=torch.int32),
        }
        per_row = (plan["slot_ids"], plan["query_lens"], plan["modes"])
        step = advance(AdvanceAttributes(self.emission.options.replay.window), self.cursors, *per_row, tokens)
        return plan | {"step": step}

    def by_torch(self, ids: Tensor, plan: Mapping[str, Tensor]) -> Tensor:
        emission, kv_len = self.emission, int(self.cursors[:, Cursor.COMMITTED].max()) + ids.shape[1]
        net = TorchNetwork(emission.weights, self.views(self.mine), plan["step"], emission.options.activation, kv_len)
        return emission.decoder.forward(net, ids, emission.options.replay)

    def by_network(
        self, ids: Tensor, plan: Mapping[str, Tensor], exchange: Callable[[Tensor], list[Tensor]] | None = None
    ) -> Tensor:
        """exchange: see Interpreter."""
        positions = torch.arange(ids.shape[1], dtype=torch.int32).repeat(len(ids), 1)
        feeds = {"input_ids": ids.int(), "logit_positions": positions} | self.theirs
        whole = self.emission.plugins.with_advance
        wanted = ("cursors", "slot_ids", "query_lens", "modes") if whole else ("step",)
        feeds |= {name: plan[name] for name in wanted}
        step = self.emission.step
        memory = {tensor.name: value for value, tensor in step.emitter.constants()}
        interpreter = Interpreter(self.emission.tensorrt, step.network, self.resolve, exchange, memory)
        got = interpreter.run(feeds)
        if whole:
            assert torch.equal(got["cursors_out"], self.cursors)
        for name, pool in self.theirs.items():
            # Without the in-place layer the cache is a new tensor; a session would bind both names to one address.
            pool.copy_(got[f"{name}_out"].clone())
        return got["logits"]

    def views(self, bound: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: logical(bound[name], pool) for name, pool in self.pools.items()}

    def resolve(self, interpreter: Interpreter, name: str) -> Tensor:
        """What the plugin layer that the network was cut at would have computed."""
        for kind, attributes, inputs, outputs in self.emission.plugins.calls:
            if outputs[0].name == name:
                values = {key: interpreter.value(tensor.name) for key, tensor in inputs.items()}
                for key, tensor in inputs.items():
                    if tensor.name in self.pools:
                        values[key] = logical(values[key], self.pools[tensor.name])
                return REFERENCES[kind](attributes, values)
        raise AssertionError(f"no plugin layer makes {name}")


def bound_pool(pool: Pool, rows: int) -> Tensor:
    """The pool as it is bound to an engine: KV caches in their shape, others as elements with padding."""
    shape = pool.shape if pool.kind == "kv" else (slot_elements(pool),)
    return torch.zeros(rows, *shape, dtype=pool.dtype)


def logical(bound: Tensor, pool: Pool) -> Tensor:
    """A view in the pool's own shape."""
    count = torch.Size(pool.shape).numel()
    return bound if pool.kind == "kv" else bound[:, :count].unflatten(1, pool.shape)


def reference_conv(attributes: Any, v: dict[str, Tensor]) -> Tensor:
    return conv.causal_conv(attributes, v["x"], v["weight"], v.get("bias"), v["step"], v["conv_ring"])


def reference_mamba2(attributes: Any, v: dict[str, Tensor]) -> Tensor:
    parameters = (v["A_log"], v["dt_bias"], v["D"])
    return mamba2.mamba2(attributes, v["xbc"], v["dt"], *parameters, v["step"], v)


def reference_gated_delta(attributes: Any, v: dict[str, Tensor]) -> Tensor:
    return delta_rule.gated_delta(attributes, v["qkv"], v["a"], v["b"], v["A_log"], v["dt_bias"], v["step"], v)


def reference_kda(attributes: Any, v: dict[str, Tensor]) -> Tensor:
    return delta_rule.kda(attributes, v["qkv"], v["f"], v["b"], v["A_log"], v["dt_bias"], v["step"], v)


def reference_advance(attributes: Any, v: dict[str, Tensor]) -> Tensor:
    per_row = (v["slot_ids"], v["query_lens"], v["modes"])
    return advance(attributes, v["cursors"], *per_row, v["token_ids"].shape[1])


REFERENCES = {
    "advance": reference_advance,
    "causal_conv": reference_conv,
    "mamba2": reference_mamba2,
    "gated_delta": reference_gated_delta,
    "kda": reference_kda,
}
