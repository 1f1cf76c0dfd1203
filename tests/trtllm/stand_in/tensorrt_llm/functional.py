"""Tensors, and the operations that ReplaySSM models leave to TensorRT-LLM."""

import math
import weakref
from collections import OrderedDict
from enum import IntEnum

import numpy as np

from tensorrt_llm import graph_rewriting
from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm._utils import str_dtype_to_trt
from tensorrt_llm.plugin import current_all_reduce_helper
from tensorrt_llm.trt import trt


class DimRange:
    """Ranges of one tensor in one profile."""

    def __init__(self, shape, names):
        assert len(names) == len(shape)
        for size in shape:
            if isinstance(size, list | tuple):
                assert len(size) == 3 and 0 <= size[0] <= size[1] <= size[2], size
            else:
                assert type(size) is int, size
        self.dimension_names = names
        self.min, self.opt, self.max = (
            [size if type(size) is int else size[place] for size in shape] for place in range(3)
        )


class Tensor:
    """A network input when named; a wrapper of a tensor of TensorRT when given one; otherwise filled in later."""

    def __init__(
        self,
        name=None,
        dtype=None,
        shape=None,
        dim_range=None,
        is_network_input=True,
        location=None,
        network=None,
        trt_tensor=None,
    ):
        self.profiles, self.is_tensor_wrapper = [], trt_tensor is not None
        if trt_tensor is not None:
            assert network is not None and not is_network_input
            self.trt_tensor, self._network = trt_tensor, weakref.ref(network)
            return
        self._network = weakref.ref(default_net())
        if not is_network_input:
            return
        dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        if dim_range is not None:
            assert isinstance(dim_range, OrderedDict) and dim_range
            counts = {len(ranges) for ranges in dim_range.values()}
            assert len(counts) == 1, dim_range
            for i in range(counts.pop()):
                self.profiles.append(DimRange([ranges[i] for ranges in dim_range.values()], list(dim_range)))
        default_net()._add_input(self, name, dtype, shape, dim_range)
        # The real one sets dtype, shape and location once more; TensorRT-RTX lets only the shape be set.
        self.trt_tensor.shape = shape

    @property
    def name(self):
        return self.trt_tensor.name

    @property
    def dtype(self):
        return self.trt_tensor.dtype

    @property
    def shape(self):
        return self.trt_tensor.shape

    def ndim(self):
        return len(self.shape)

    def cast(self, dtype):
        wanted = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        if self.dtype == wanted:
            return self
        layer = default_trtnet().add_cast(self.trt_tensor, wanted)
        return _create_tensor(layer.get_output(0), layer)

    def mark_output(self, name=None, dtype=None):
        default_net()._mark_output(self, name, str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype)


def _create_tensor(trt_tensor, producer, kind="layer"):
    """kind: begins the layer's name."""
    assert trt_tensor is not None and producer is not None
    default_net()._set_layer_name(producer, kind)
    tensor = Tensor(is_network_input=False)
    tensor.trt_tensor, tensor.producer = trt_tensor, producer
    return tensor


class PositionEmbeddingType(IntEnum):
    learned_absolute = 0
    rope_gptj = 1
    rope_gpt_neox = 2

    def __str__(self):
        return self.name

    @staticmethod
    def from_string(text):
        return PositionEmbeddingType[text]


@graph_rewriting.record_signature
def gpt_attention(
    *,
    qkv,
    past_key_value,
    sequence_length,
    host_past_key_value_lengths,
    host_max_attention_window_sizes,
    host_sink_token_length,
    context_lengths,
    cache_indirection,
    host_request_types,
    layer_idx,
    num_heads,
    num_kv_heads,
    hidden_size_per_head,
    q_scaling,
    rotary_embedding_dim=0,
    position_embedding_type=PositionEmbeddingType.learned_absolute,
    max_context_length=None,
    tp_size=1,
    tp_rank=0,
    kv_cache_block_offsets=None,
    host_kv_cache_block_offsets=None,
    host_kv_cache_pool_pointers=None,
    host_kv_cache_pool_mapping=None,
    host_context_lengths=None,
    host_runtime_perf_knobs=None,
    host_context_progress=None,
):
    """The plugin's checks of its inputs. In its place the network is cut open: ``cut/attention_N/qkv`` and ``.../out``."""
    config, name = default_net().plugin_config, f"cut/attention_{layer_idx}"
    assert isinstance(max_context_length, int)
    assert host_context_lengths is not None or not config.remove_input_padding
    inputs = [
        sequence_length,
        host_past_key_value_lengths,
        host_max_attention_window_sizes,
        host_sink_token_length,
        context_lengths,
        cache_indirection,
        host_request_types,
        host_runtime_perf_knobs,
        host_context_progress,
    ]
    paged = (
        kv_cache_block_offsets,
        host_kv_cache_block_offsets,
        host_kv_cache_pool_pointers,
        host_kv_cache_pool_mapping,
    )
    inputs += paged if config.paged_kv_cache else [past_key_value]
    assert all(tensor is not None for tensor in inputs)
    assert qkv.dtype == str_dtype_to_trt(config.gpt_attention_plugin), "the plugin's dtype and its input's differ"
    assert qkv.ndim() == (2 if config.remove_input_padding else 3)
    assert qkv.shape[-1] == (num_heads + 2 * num_kv_heads) * hidden_size_per_head
    assert 0 <= layer_idx < host_max_attention_window_sizes.shape[0]
    qkv.mark_output(f"{name}/qkv")
    tokens = [profile_sizes(profile) for profile in default_net()._inputs["input_ids"].profiles]
    if config.remove_input_padding:
        leading = [(f"{name}_tokens", [[math.prod(sizes) for sizes in zip(*axes)] for axes in tokens])]
    else:
        leading = [("rows", [axes[0] for axes in tokens]), ("tokens", [axes[1] for axes in tokens])]
    width = num_heads * hidden_size_per_head
    ranges = OrderedDict([*leading, (f"{name}_width", [width] * len(tokens))])
    cut = Tensor(name=f"{name}/out", dtype=qkv.dtype, shape=[-1] * len(leading) + [width], dim_range=ranges)
    layer = default_trtnet().add_identity(cut.trt_tensor)
    output = _create_tensor(layer.get_output(0), layer, "GPTAttention")
    if config.paged_kv_cache:
        return output, None
    kept = default_trtnet().add_identity(past_key_value.trt_tensor)
    return output, _create_tensor(kept.get_output(0), kept)


def profile_sizes(profile):
    """(least, usual, most) of every axis."""
    return list(zip(profile.min, profile.opt, profile.max))


#: An axis that TensorRT reads when it likes.
FIRST = np.zeros(1, np.int32)
#: Whether collectives are TensorRT's own, which can be computed, instead of stand-ins that can be built.
COMPUTED = False


def collective(tensor, group, operation, reduction):
    """TensorRT's layer; a gather puts the ranks behind each other along the first axis."""
    kinds = getattr(trt.CollectiveOperation, operation), getattr(trt.ReduceOperation, reduction)
    layer = default_trtnet().add_dist_collective(tensor, *kinds, -1, group)
    layer.num_ranks = len(group)
    return layer


def allreduce(tensor, group, all_reduce_params=None):
    """The plugin's checks; in its place the tensor itself."""
    assert current_all_reduce_helper().workspace is not None, "no workspace: the real package would change its strategy"
    assert default_net().plugin_config.nccl_plugin and len(group) > 1
    part = tensor.cast(default_net().plugin_config.nccl_plugin).trt_tensor
    layer = collective(part, group, "ALL_REDUCE", "SUM") if COMPUTED else default_trtnet().add_identity(part)
    return _create_tensor(layer.get_output(0), layer, "AllReduce").cast(tensor.dtype)


def allgather(tensor, group, gather_dim=0):
    """The same for every rank's part of the last axis."""
    assert gather_dim == -1 and len(group) > 1 and tensor.ndim() == 3
    part, net = tensor.cast(default_net().plugin_config.nccl_plugin).trt_tensor, default_trtnet()
    if COMPUTED:
        axis = net.add_constant((1,), trt.Weights(trt.int32, FIRST.ctypes.data, 1)).get_output(0)
        stacked = collective(net.add_unsqueeze(part, axis).get_output(0), group, "ALL_GATHER", "NONE").get_output(0)
        layer = net.add_shuffle(stacked)
        layer.first_transpose = (1, 2, 0, 3)
        layer.reshape_dims = (0, 0, len(group) * tensor.shape[2])
    else:
        layer = net.add_concatenation([part] * len(group))
        layer.axis = 2
    return _create_tensor(layer.get_output(0), layer).cast(tensor.dtype)
