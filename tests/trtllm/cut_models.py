"""The model classes on a TensorRT without plugin layers: cut open where those would stand."""

from emission import RecordedPlugins
from tensorrt_llm.trt import CAPABILITY, TENSORRT

from trtllm_replayssm.trtllm.model_cls import ReplaySSMForCausalLM, ReplaySSMOwnCacheForCausalLM


class Cut:
    """plugins: remembers the layers that the network was cut at."""

    def tensorrt(self):
        return TENSORRT

    def capability(self):
        return CAPABILITY

    def plugin_layer(self, tensorrt):
        self.plugins = RecordedPlugins()
        return self.plugins


class CutForCausalLM(Cut, ReplaySSMForCausalLM):
    pass


class CutOwnCacheForCausalLM(Cut, ReplaySSMOwnCacheForCausalLM):
    pass
