"""The network backend on TensorRT-LLM's own network: its inputs, its attention, its sums over ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensorrt_llm import functional
from tensorrt_llm._common import default_net

from trtllm_replayssm.compat import TensorRT
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.tensorrt.backend import State, TensorRTNetwork
from trtllm_replayssm.network.tensorrt.emitter import Emitter, Tensor

#: What to do about attention that the plugin cannot compute.
OWN_CACHE = "build with --model_cls_name ReplaySSMOwnCacheForCausalLM"
#: Least, usual and most value of every dynamic size, for one profile.
Ranges = Mapping[str, tuple[int, int, int]]


def wrapped(tensor: Tensor) -> Any:
    """TensorRT's tensor as one of TensorRT-LLM."""
    return functional.Tensor(trt_tensor=tensor, network=default_net(), is_network_input=False)


class TrtLlmEmitter(Emitter):
    """Declares inputs as TensorRT-LLM does, with their profiles, for its builder to find. profiles: one for each."""

    def __init__(self, tensorrt: TensorRT, network: Any, profiles: Sequence[Ranges]) -> None:
        # Sums over ranks are TensorRT-LLM's own plugins, whatever TensorRT can do.
        super().__init__(replace(tensorrt, features=replace(tensorrt.features, collective=True)), network)
        self.profiles = profiles

    def input(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], dims: Sequence[str] = ("rows", "tokens")
    ) -> Tensor:
        unnamed = iter(dims)
        symbols = tuple(next(unnamed) if size == -1 else size for size in shape)
        # Axes of one name must agree in all inputs, so a static axis has a name of its own.
        ranges = OrderedDict(
            (size, [list(profile[size]) for profile in self.profiles])
            if isinstance(size, str)
            else (f"{name}_{axis}", [size] * len(self.profiles))
            for axis, size in enumerate(symbols)
        )
        made = functional.Tensor(name=name, dtype=self.tensorrt.dtype(dtype), shape=list(shape), dim_range=ranges)
        self.inputs[name] = symbols
        return made.trt_tensor


@dataclass(frozen=True)
class KeptByPlugin:
    """Keys or values that the attention plugin will write into the cache it keeps. state: the cache that it replaces."""

    state: State
    new: Tensor


@dataclass(frozen=True)
class PluginAttention:
    """TensorRT-LLM's attention layers of one model.

    inputs: what ``prepare_attention_inputs`` made, by name. places: position among the attention layers by the prefix of
    their pools. longest: most tokens of one request in a step. mapping: of the rank.
    """

    inputs: Mapping[str, Any]
    places: Mapping[str, int]
    longest: int
    mapping: Any

    #: Inputs that every layer takes as they are.
    SHARED = (
        "sequence_length",
        "host_past_key_value_lengths",
        "host_max_attention_window_sizes",
        "host_sink_token_length",
        "context_lengths",
        "cache_indirection",
        "host_request_types",
        "kv_cache_block_offsets",
        "host_kv_cache_block_offsets",
        "host_kv_cache_pool_pointers",
        "host_kv_cache_pool_mapping",
        "host_context_lengths",
        "host_runtime_perf_knobs",
        "host_context_progress",
    )

    def __call__(self, layer: str, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, scale: float) -> Tensor:
        """Attention of ``qkv [..., (heads + 2 kv_heads) head_dim]``, whose positions are in it already."""
        place = self.places[layer]
        out, present = functional.gpt_attention(
            qkv=wrapped(qkv),
            past_key_value=self.inputs["past_key_value"][place],
            layer_idx=place,
            num_heads=heads,
            num_kv_heads=kv_heads,
            hidden_size_per_head=head_dim,
            # The plugin divides scores by q_scaling * sqrt(head_dim).
            q_scaling=1 / (scale * math.sqrt(head_dim)),
            position_embedding_type=functional.PositionEmbeddingType.learned_absolute,
            max_context_length=self.longest,
            tp_size=self.mapping.tp_size,
            tp_rank=self.mapping.tp_rank,
            **{name: self.inputs[name] for name in self.SHARED},
        )
        if present is not None:
            present.mark_output(f"present_key_value_{place}")
        return out.trt_tensor


class TrtLlmNetwork(TensorRTNetwork):
    """Emits into TensorRT-LLM's network. attention: its attention; None for TensorRT's own layers and caches of ours."""

    def __init__(self, *step: Any, mapping: Any, attention: PluginAttention | None) -> None:
        self.mapping, self.plugin_attention = mapping, attention
        super().__init__(*step)

    def shape(self, x: Any) -> tuple[int, ...]:
        return super().shape(x.state if isinstance(x, KeptByPlugin) else x)

    def _cache_update(self, cache: State, x: Tensor) -> Tensor | KeptByPlugin:
        attention, layer = self.plugin_attention, cache.name.rpartition(".")[0]
        if attention is None or layer not in attention.places:
            return super()._cache_update(cache, x)
        return KeptByPlugin(cache, x)

    def _attention(self, q: Tensor, k: Any, v: Any, scale: float, *limits: Any) -> Tensor:
        """limits: what a token sees of the cache besides its past, None for all of it."""
        if self.plugin_attention is None or not isinstance(k, KeptByPlugin):
            return super()._attention(q, k, v, scale, *limits)
        if any(limit is not None for limit in limits):
            # The plugin knows windows only, as a number that the run time hands in and that makes its cache a ring.
            raise UserError("attention to a part of the past does not go through TensorRT-LLM's plugin", OWN_CACHE)
        e, config, (heads, head_dim) = self.emitter, default_net().plugin_config, self.shape(q)[2:]
        whole = e.concat([self._flatten(part, 2) for part in (q, k.new, v.new)], 2)
        qkv = e.cast(whole, getattr(torch, config.gpt_attention_plugin))
        if config.remove_input_padding:
            # Rows have T tokens each: padding of a row is computed like tokens, and overwritten by its next step.
            qkv = e.reshape(qkv, (-1, whole.shape[2]))
        layer, kv_heads = k.state.name.rpartition(".")[0], self.shape(k.new)[2]
        out = self.plugin_attention(layer, qkv, heads, kv_heads, head_dim, scale)
        # The sizes of q, which the plugin's output has lost.
        return e.reshape_like(e.cast(out, e.dtype(q)), e.shape(q), tuple(q.shape))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        return functional.allreduce(wrapped(x), self.mapping.tp_group, all_reduce_params=None).trt_tensor

    def all_gather(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        return functional.allgather(wrapped(x), self.mapping.tp_group, gather_dim=-1).trt_tensor
