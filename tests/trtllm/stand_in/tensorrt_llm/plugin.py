"""Options of the real package's plugins, and the workspace of its all-reduce."""

from collections import OrderedDict
from dataclasses import dataclass

from tensorrt_llm.trt import trt


@dataclass
class PluginConfig:
    """``auto`` is the model's dtype; ``paged_kv_cache`` and ``paged_state`` are settled by the builder."""

    dtype: str = "float16"
    _gpt_attention_plugin: str | None = "auto"
    nccl_plugin: str | None = None
    paged_kv_cache: bool | None = None
    paged_state: bool | None = None
    remove_input_padding: bool = True
    use_paged_context_fmha: bool = True
    context_fmha: bool = True
    tokens_per_block: int = 32
    manage_weights: bool = False

    @property
    def gpt_attention_plugin(self):
        return self.dtype if self._gpt_attention_plugin == "auto" else self._gpt_attention_plugin

    def to_dict(self):
        return dict(vars(self))


class CustomAllReduceHelper:
    def __init__(self):
        self.workspace = None

    def set_workspace_tensor(self, mapping, num_profiles=None):
        from tensorrt_llm.functional import Tensor

        size = 7 * mapping.tp_size + 2
        ranges = OrderedDict([("all_reduce_size", [size] * num_profiles)])
        self.workspace = Tensor(name="all_reduce_workspace", dtype=trt.int64, shape=[size], dim_range=ranges)


helper = None


def init_all_reduce_helper():
    global helper
    helper = CustomAllReduceHelper()


def current_all_reduce_helper():
    assert helper is not None, "init_all_reduce_helper was not called"
    return helper
