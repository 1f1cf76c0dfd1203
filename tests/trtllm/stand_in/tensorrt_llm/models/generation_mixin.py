"""Inputs of the attention plugin."""

import math
from collections import OrderedDict

from tensorrt_llm.bindings import KVCacheType
from tensorrt_llm.functional import Tensor
from tensorrt_llm.trt import trt


class GenerationMixin:
    @staticmethod
    def default_range(most):
        return [1, (most + 1) // 2, most]

    def prepare_attention_inputs(
        self,
        *,
        max_batch_size,
        max_beam_width,
        max_input_len,
        max_seq_len,
        num_kv_heads,
        head_size,
        num_layers,
        kv_dtype,
        kv_cache_type,
        num_profiles=1,
        enable_ctx_gen_opt_profiles=False,
        remove_input_padding=False,
        use_gpt_attention_plugin=False,
        tokens_per_block=32,
        mapping=None,
        streamingllm=False,
        attn_layer_idx=None,
        opt_batch_size=None,
        num_kv_heads_per_layer=None,
    ):
        """The same ranges in all profiles. num_kv_heads: over all ranks."""
        kv_heads = (num_kv_heads + mapping.tp_size - 1) // mapping.tp_size
        rows = ("batch_size_beam_width", [self.default_range(max_batch_size)] * num_profiles)
        lengths = self.default_range(max_seq_len)

        def tensor(name, shape, *axes, dtype=trt.int32):
            ranges = [axis if isinstance(axis[1], list) else (axis[0], [axis[1]] * num_profiles) for axis in axes]
            return Tensor(name=name, dtype=dtype, shape=shape, dim_range=OrderedDict(ranges))

        inputs = dict.fromkeys(
            (
                "attention_mask",
                "kv_cache_block_offsets",
                "host_kv_cache_block_offsets",
                "host_kv_cache_pool_pointers",
                "host_kv_cache_pool_mapping",
                "host_context_lengths",
            )
        )
        assert use_gpt_attention_plugin and kv_cache_type != KVCacheType.DISABLED
        inputs["past_key_value"] = [None] * num_layers
        if kv_cache_type == KVCacheType.PAGED:
            blocks = [math.ceil(length / tokens_per_block) for length in lengths]
            pools = ("num_kv_cache_pools", [[1, 1, num_layers]] * num_profiles)
            axes = (pools, rows, ("kv", 2), ("max_blocks_per_seq", [blocks] * num_profiles))
            for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
                inputs[name] = tensor(name, [-1, -1, 2, -1], *axes)
            name = "host_kv_cache_pool_pointers"
            inputs[name] = tensor(name, [-1, 2], ("num_pools_layers", pools[1]), ("num_pools_kv", 2), dtype=trt.int64)
            name = "host_kv_cache_pool_mapping"
            inputs[name] = tensor(name, [num_layers, 2], ("pools_mapping", num_layers), ("layer_cache_pool_locator", 2))
        else:
            for layer in range(num_layers):
                axes = (rows, ("kv", 2), ("num_heads", kv_heads), ("past_key_len", [lengths] * num_profiles))
                shape = [-1, 2, kv_heads, -1, head_size]
                inputs["past_key_value"][layer] = tensor(
                    f"past_key_value_{layer}", shape, *axes, ("head_size", head_size), dtype=kv_dtype
                )
        for name in ("sequence_length", "host_request_types", "host_past_key_value_lengths", "context_lengths"):
            inputs[name] = tensor(name, [-1], rows)
        if remove_input_padding:
            inputs["host_context_lengths"] = tensor("host_context_lengths", [-1], rows)
        for name, size, dtype in (
            ("host_runtime_perf_knobs", 16, trt.int64),
            ("host_context_progress", 1, trt.int64),
            ("host_max_attention_window_sizes", num_layers, trt.int32),
            ("host_sink_token_length", 1, trt.int32),
        ):
            inputs[name] = tensor(name, [size], (f"{name}_size", size), dtype=dtype)
        inputs["cache_indirection"] = tensor(
            "cache_indirection",
            [-1, -1, -1],
            ("batch_size_cache", rows[1]),
            ("beam_width", [self.default_range(max_beam_width)] * num_profiles),
            ("max_seq_len", [lengths] * num_profiles),
        )
        return inputs
