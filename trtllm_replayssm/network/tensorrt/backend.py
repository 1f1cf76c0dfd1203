"""``TensorRTNetwork``: the op vocabulary as layers of a strongly typed network definition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.base import DYNAMIC, Network, Rope
from trtllm_replayssm.network.gated import GATED, Limit
from trtllm_replayssm.network.ngram import NgramHash
from trtllm_replayssm.network.packed import PackedWeight, StoredWeight, dense
from trtllm_replayssm.network.tensorrt import ngram, selection
from trtllm_replayssm.network.tensorrt.attention import StepPositions, attend, rotate, update_cache
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor
from trtllm_replayssm.network.tensorrt.experts import grouped_experts, native_experts, native_fits
from trtllm_replayssm.network.tensorrt.packed import dequantised, rounded_inputs
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginLayer, PluginOutput
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.pools import SLOT_ALIGNMENT, Pool
from trtllm_replayssm.plugins.quantised_state import SCALE


@dataclass(frozen=True)
class Weight:
    """A weight that has a name and memory on the host, and becomes a constant where a layer uses it."""

    name: str
    memory: StoredWeight


@dataclass(frozen=True)
class State:
    """A pool that becomes a network input where a layer uses it."""

    name: str
    pool: Pool


class TensorRTNetwork(Network):
    """Emits one step into ``emitter``'s network; nothing is computed.

    weights: the rank's tensors by name, on the CPU and dense; they must live until the engine is built. pools: the rank's
    state by name (HybridDecoder.pools). step: int32 ``[rows, STEP_WORDS]``, token_ids: int32 ``[rows, T]`` and
    logit_positions: int32 ``[rows, logits]``, the tokens of each row that ``select_last`` takes. activation: dtype of the
    residual stream. plugin_layer: adds the plugin layers. capability: of the GPU that the engine is for, None if unknown.

    Every state tensor ``X`` is a network input of that name and an output ``X_out``, to be bound to one address. A KV cache
    has its own shape ``[rows, H, cache_rows, D]``; other pools are ``[rows, elements]``, a slot's elements with its padding,
    so that every slot starts at an address that can be bound.
    """

    def __init__(
        self,
        emitter: Emitter,
        weights: Mapping[str, StoredWeight],
        pools: Mapping[str, Pool],
        step: Tensor,
        token_ids: Tensor,
        logit_positions: Tensor,
        activation: torch.dtype,
        plugin_layer: PluginLayer,
        tp_size: int = 1,
        capability: tuple[int, int] | None = None,
    ) -> None:
        self.emitter, self.weights, self.pools, self.step = emitter, weights, pools, step
        self.logit_positions, self.dtype = logit_positions, activation
        self.plugin_layer, self.tp_size, self.capability = plugin_layer, tp_size, capability
        caches = [pool.positions for pool in pools.values() if pool.kind == "kv"]
        self._vectors: dict[tuple, torch.Tensor] = {}
        self.where = StepPositions(emitter, step, token_ids, min(caches, default=1))
        if tp_size > 1 and not emitter.tensorrt.features.collective:
            raise EngineError(
                f"TensorRT {emitter.tensorrt.version_text} cannot sum over {tp_size} ranks",
                "tensor parallelism needs TensorRT 11 or later; convert with --tp_size 1, or use --engine_flavour embedded",
            )

    def shape(self, x: Tensor | Weight | State) -> tuple[int, ...]:
        if isinstance(x, Weight):
            return tuple(x.memory.shape)
        return (DYNAMIC, *x.pool.shape) if isinstance(x, State) else tuple(x.shape)

    def weight(self, name: str) -> Weight:
        self.emitter.scope = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]
        return Weight(name, self.weights[name])

    def pool(self, name: str) -> State:
        return State(name, self.pools[name])

    def constant(self, weight: Weight, leading: int = 0) -> Tensor:
        """The weight as a constant of its own dtype, with so many axes of size 1 before its own.

        One that is stored quantised is dequantised by layers.
        """
        if isinstance(weight.memory, PackedWeight):
            return dequantised(self.emitter, weight.memory, self.capability, leading)
        return self.emitter.constant(weight.memory, (1,) * leading + tuple(weight.memory.shape))

    def vector(self, weight: Weight, rank: int, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
        """``offset + weight`` along the last axis in another dtype; vectors are small enough to be made on the host."""
        memory = dense(weight.memory)
        if dtype != memory.dtype or offset:
            key = (weight.name, dtype, offset)
            memory = self._vectors.setdefault(key, (memory.float() + offset).to(dtype))
        return self.emitter.constant(memory, (1,) * (rank - 1) + tuple(memory.shape))

    # ---- dense ops ---------------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Tensor, table: Weight) -> Tensor:
        e, memory = self.emitter, dense(table.memory)
        whole = e.constant(memory, (math.prod(memory.shape[:-1]), memory.shape[-1]))
        return e.cast(e.gather(whole, token_ids, 0), self.dtype)

    def _linear(self, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
        e, rank = self.emitter, len(x.shape)
        x = e.cast(x, weight.memory.dtype)
        if isinstance(weight.memory, PackedWeight):
            x = rounded_inputs(e, x, weight.memory, self.capability)
        out = e.matmul(x, self.constant(weight, rank - 2), transpose_b=True)
        return out if bias is None else self._add_bias(out, bias)

    def _rms_norm(
        self, x: Tensor, weight: Weight | None, epsilon: float, zero_centred: bool, groups: int, over_ranks: bool
    ) -> Tensor:
        e, rank, width = self.emitter, len(x.shape), x.shape[-1]
        wide = e.cast(x, torch.float32)
        if groups > 1:
            wide = self._unflatten(wide, (groups, width // groups))
        mean = e.reduce("AVG", e.binary("PROD", wide, wide), len(wide.shape) - 1)
        if over_ranks:
            mean = self.scale(self.all_reduce(mean), 1 / self.tp_size)
        root = e.unary("SQRT", e.binary("SUM", mean, e.scalar(epsilon, mean)))
        normed = e.binary("DIV", wide, root)
        if groups > 1:
            normed = self._flatten(normed, 2)
        if weight is None:
            return e.cast(normed, e.dtype(x))
        scaled = e.binary("PROD", normed, self.vector(weight, rank, torch.float32, 1.0 if zero_centred else 0.0))
        return e.cast(scaled, e.dtype(x))

    def activation(self, x: Tensor, kind: str) -> Tensor:
        e = self.emitter
        if kind == "relu2":
            positive = e.activation("RELU", x)
            return e.binary("PROD", positive, positive)
        if kind == "signed_root":
            size = e.binary("MAX", e.unary("ABS", x), e.scalar(1e-6, x))
            return e.binary("PROD", e.unary("SIGN", x), e.unary("SQRT", size))
        # In float32, as torch does inside its own kernels.
        wide = e.cast(x, torch.float32)
        if kind == "tanh":
            return e.cast(e.activation("TANH", wide), e.dtype(x))
        gate = e.activation("SIGMOID", wide)
        return e.cast(gate if kind == "sigmoid" else e.binary("PROD", wide, gate), e.dtype(x))

    def _add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.emitter.binary("SUM", a, b)

    def _add_bias(self, x: Tensor, bias: Weight) -> Tensor:
        return self.emitter.binary("SUM", x, self.vector(bias, len(x.shape), self.emitter.dtype(x)))

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self.emitter.binary("PROD", a, b)

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return self.emitter.binary("DIV", a, b)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1 else self.emitter.binary("PROD", x, self.emitter.scalar(factor, x))

    def offset(self, x: Tensor, amount: float) -> Tensor:
        return self.emitter.binary("SUM", x, self.emitter.scalar(amount, x))

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        e = self.emitter
        if not math.isinf(low):
            x = e.binary("MAX", x, e.scalar(low, x))
        return x if math.isinf(high) else e.binary("MIN", x, e.scalar(high, x))

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return self.emitter.cast(x, torch.float32 if dtype == "float32" else self.dtype)

    def cast_like(self, x: Tensor, other: Tensor) -> Tensor:
        return self.emitter.cast(x, self.emitter.dtype(other))

    # ---- shapes ------------------------------------------------------------------------------------------------------

    def _split(self, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        axis, starts = len(x.shape) - 1, [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.emitter.slice(x, axis, start, size) for start, size in zip(starts, sizes))

    def concat(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.emitter.concat(tensors, len(tensors[0].shape) - 1)

    def _unflatten(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return self.emitter.reshape(x, (0,) * (len(x.shape) - 1) + tuple(sizes))

    def _flatten(self, x: Tensor, axes: int) -> Tensor:
        shape = self.shape(x)
        return self.emitter.reshape(x, (0,) * (len(shape) - axes) + (math.prod(shape[-axes:]),))

    def _per_head(self, x: Tensor, weight: Weight) -> Tensor:
        e = self.emitter
        by_head = e.transpose(e.cast(x, weight.memory.dtype), (0, 2, 1, 3))
        return e.transpose(e.matmul(by_head, self.constant(weight, 1), transpose_b=True), (0, 2, 1, 3))

    def _matmul(self, a: Tensor, b: Tensor, transpose_a: bool) -> Tensor:
        return self.emitter.matmul(a, b, transpose_a)

    def _doubly_stochastic(self, x: Tensor, iterations: int, epsilon: float) -> Tensor:
        # Sums as products with ones: between sums as reductions, TensorRT would compute everything before anew.
        e, size = self.emitter, x.shape[-1]
        column, row = (e.constant(torch.ones(1, 1, *shape)) for shape in ((size, 1), (1, size)))
        x = self.offset(self.softmax(x), epsilon)
        for i in range(2 * iterations - 1):
            total = e.matmul(x, column) if i % 2 else e.matmul(row, x)
            x = self.divide(x, self.offset(total, epsilon))
        return x

    def _ngram_ids(self, spec: NgramHash, token_ids: Tensor, cache: State) -> Tensor:
        written = self._cache_update(cache, self.emitter.reshape(token_ids, (0, 0, 1, 1)))
        history = self.emitter.reshape(written, (0, cache.pool.shape[1]))
        return ngram.ngram_ids(self.emitter, self.where, spec, token_ids, history)

    def select_last(self, x: Tensor) -> Tensor:
        """The tokens that ``logit_positions`` names: ``[rows, logits, D]``. A prefill names each row's last valid token."""
        return self.emitter.gather(x, self.logit_positions, 1, shared_axes=1)

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _rope(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(self.emitter, self.where, x, rope)

    def _cache_update(self, cache: State, x: Tensor) -> Tensor:
        updated = update_cache(self.emitter, self.where, self.state_input(cache), x)
        self.emitter.mark_output(updated, f"{cache.name}_out")
        return updated

    def _block_cache_update(self, cache: State, x: Tensor, block: int) -> Tensor:
        updated = selection.update_block_cache(self.emitter, self.where, self.state_input(cache), x, block)
        self.emitter.mark_output(updated, f"{cache.name}_out")
        return updated

    def _select_blocks(self, q: Tensor, keys: Tensor, weights: Tensor | None, block: int, count: int) -> Tensor | None:
        return selection.select_blocks(self.emitter, self.where, q, keys, weights, block, count)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, selected: Tensor | None
    ) -> Tensor:
        return attend(self.emitter, self.where, q, k, v, scale, window, selected)

    # ---- mixture of experts ------------------------------------------------------------------------------------------

    def softmax(self, x: Tensor) -> Tensor:
        return self.emitter.softmax(self.emitter.cast(x, torch.float32))

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.emitter.top_k(x, k)

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        return self.emitter.gather_elements(x, indices, len(x.shape) - 1)

    def sum(self, x: Tensor, axis: int = -1) -> Tensor:
        return self.emitter.reduce("SUM", x, len(x.shape) + axis)

    def mask_groups(self, scores: Tensor, groups: Tensor, n_group: int) -> Tensor:
        e, experts, kept = self.emitter, scores.shape[-1], groups.shape[-1]
        named = e.binary("EQUAL", e.reshape(groups, (0, 0, kept, 1)), e.arange(n_group, 4))
        count = e.reduce("SUM", e.cast(named, torch.int32), 2)
        eligible = e.binary("GREATER", e.reshape(count, (0, 0, n_group, 1)), e.number(0, torch.int32, 4))
        by_group = e.reshape(scores, (0, 0, n_group, experts // n_group))
        masked = e.select(eligible, by_group, e.scalar(-math.inf, by_group))
        return e.reshape(masked, (0, 0, experts))

    def _experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: Weight,
        down: Weight,
        activation: str,
        limit: Limit,
    ) -> Tensor:
        e, matrices = self.emitter, (self.constant(up), self.constant(down))
        dtypes = {e.dtype(x), up.memory.dtype, down.memory.dtype}
        if native_fits(e, self.capability, dtypes, activation, limit):
            return native_experts(e, x, indices, weights, *matrices)

        def hidden(rows: Tensor) -> Tensor:
            if activation == "relu2":
                return self.activation(rows, "relu2")
            gate, up = self.split(rows, (rows.shape[-1] // 2,) * 2)
            return GATED[activation](self, gate, up, limit)

        return grouped_experts(e, x, indices, weights, *matrices, hidden)

    # ---- tensor parallelism ------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else self.collective(x, "ALL_REDUCE", "SUM")

    def all_gather(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        # The collective puts the ranks behind each other along the first axis.
        e, rank = self.emitter, len(x.shape)
        stacked = self.collective(e.unsqueeze(x), "ALL_GATHER", "NONE")
        last = e.transpose(stacked, (*range(1, rank), 0, rank))
        return self.flatten(last)

    def collective(self, x: Tensor, operation: str, reduction: str) -> Tensor:
        e, trt = self.emitter, self.emitter.trt
        kinds = getattr(trt.CollectiveOperation, operation), getattr(trt.ReduceOperation, reduction)
        layer = e.network.add_dist_collective(x, *kinds, -1, list(range(self.tp_size)))
        e.named(layer, operation.lower(), x).num_ranks = self.tp_size
        return layer.get_output(0)

    # ---- plugin layers -----------------------------------------------------------------------------------------------

    def _causal_conv(
        self,
        attributes: CausalConvAttributes,
        x: Tensor,
        weight: Weight,
        bias: Weight | None,
        conv_ring: State,
    ) -> Tensor:
        taps = {"weight": self.constant(weight)} | ({} if bias is None else {"bias": self.constant(bias)})
        inputs = {"x": x} | taps | {"step": self.step}
        return self.plugin("causal_conv", attributes, inputs, {"conv_ring": conv_ring}, "y", attributes.channels)

    def _mamba2(
        self,
        attributes: Mamba2Attributes,
        xbc: Tensor,
        dt: Tensor,
        A_log: Weight,
        dt_bias: Weight,
        D: Weight,
        pools: dict[str, State],
    ) -> Tensor:
        constants = {"A_log": A_log, "dt_bias": dt_bias, "D": D}
        inputs = {"xbc": xbc, "dt": dt} | self.float32(constants) | {"step": self.step}
        return self.plugin("mamba2", attributes, inputs, pools, "y", attributes.num_heads * attributes.head_dim)

    def _gated_delta(
        self,
        attributes: GatedDeltaAttributes,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Weight,
        dt_bias: Weight,
        pools: dict[str, State],
    ) -> Tensor:
        inputs = {"qkv": qkv, "a": a, "b": b} | self.float32({"A_log": A_log, "dt_bias": dt_bias}) | {"step": self.step}
        width = attributes.num_value_heads * attributes.value_dim
        return self.plugin("gated_delta", attributes, inputs, pools, "o", width)

    def _kda(
        self,
        attributes: KdaAttributes,
        qkv: Tensor,
        f: Tensor,
        b: Tensor,
        A_log: Weight,
        dt_bias: Weight,
        pools: dict[str, State],
    ) -> Tensor:
        inputs = {"qkv": qkv, "f": f, "b": b} | self.float32({"A_log": A_log, "dt_bias": dt_bias}) | {"step": self.step}
        return self.plugin("kda", attributes, inputs, pools, "o", attributes.num_heads * attributes.value_dim)

    def float32(self, weights: Mapping[str, Weight]) -> dict[str, Tensor]:
        return {name: self.vector(weight, 1, torch.float32) for name, weight in weights.items()}

    def plugin(
        self, kind: str, attributes: Any, inputs: dict[str, Tensor], pools: Mapping[str, State], result: str, width: int
    ) -> Tensor:
        """One plugin layer whose result is ``[rows, T, width]`` in the activation dtype and whose pools are updated.

        Raises EngineError for a quantised state, which none of them has.
        """
        if SCALE in pools:
            raise EngineError(
                f"{kind} layers of TensorRT's networks have no int8 or fp8 states", "use --state_dtype float16"
            )
        self.emitter.scope = next(iter(pools.values())).name.rpartition(".")[0]
        bound = {name: self.state_input(state) for name, state in pools.items()}
        outputs = [PluginOutput(result, (DYNAMIC, DYNAMIC, width), self.dtype)]
        for name, state in pools.items():
            outputs.append(PluginOutput(f"{name}_out", (DYNAMIC, slot_elements(state.pool)), state.pool.dtype, name))
        self.emitter.plugin_layers.append((self.emitter.scope, kind))
        y, *updated = self.plugin_layer(self.emitter, kind, attributes, inputs | bound, tuple(outputs))
        for state, tensor in zip(pools.values(), updated):
            self.emitter.mark_output(tensor, f"{state.name}_out")
        return y

    # ---- inputs and outputs of the network ---------------------------------------------------------------------------

    def state_input(self, state: State) -> Tensor:
        """The pool as a network input. Raises EngineError when its slots could not be bound one by one."""
        pool, dense = state.pool, math.prod(state.pool.shape) * state.pool.dtype.itemsize
        if pool.kind == "kv" and dense != pool.slot_bytes:
            raise EngineError(
                f"{state.name} takes {dense} bytes a request, which TensorRT cannot bind; it wants multiples of "
                f"{SLOT_ALIGNMENT}",
                f"choose a --max_seq_len for which {pool.shape[1]} becomes a multiple of 8",
            )
        return self.emitter.input(state.name, pool.dtype, (DYNAMIC, *bound_sizes(pool)))


def bound_sizes(pool: Pool) -> tuple[int, ...]:
    """Sizes of one slot of a pool as it is bound: a KV cache's own, else all elements up to the next slot."""
    return pool.shape if pool.kind == "kv" else (slot_elements(pool),)


def slot_elements(pool: Pool) -> int:
    """Elements from one slot to the next."""
    return pool.slot_bytes // pool.dtype.itemsize
