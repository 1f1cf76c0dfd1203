"""A network definition with TensorRT-LLM's own notes about it."""

from contextlib import contextmanager
from itertools import count

from tensorrt_llm import _common
from tensorrt_llm.plugin import PluginConfig


class Network:
    def __init__(self, trt_network):
        self._trt_network, self._inputs = trt_network, {}
        self.plugin_config, self.named_parameters = PluginConfig(), None
        self.strongly_typed, self._ids = True, count()
        #: Arguments of every attention layer by its name, as the real package's passes use them.
        self.flayers = {}

    @property
    def trt_network(self):
        return self._trt_network

    def _add_input(self, tensor, name, dtype, shape, dim_range=None):
        tensor.trt_tensor = self.trt_network.add_input(name=name, shape=shape, dtype=dtype)
        assert tensor.trt_tensor is not None, f"input {name} {dtype} {shape} is refused"
        assert name not in self._inputs, f"input {name} is there twice"
        for axis, dimension in enumerate(dim_range or ()):
            tensor.trt_tensor.set_dimension_name(axis, str(dimension))
        self._inputs[name] = tensor

    def _mark_output(self, tensor, name, dtype):
        assert dtype is None or dtype == tensor.dtype
        self.trt_network.mark_output(tensor.trt_tensor)
        tensor.trt_tensor.name = name

    def set_named_parameters(self, named_parameters):
        self.named_parameters = named_parameters

    def get_parameter_tensor(self, parameter):
        return None

    def _set_layer_name(self, layer, kind):
        layer.name = f"{kind}_{next(self._ids)}"
        for i in range(layer.num_outputs):
            layer.get_output(i).name = f"{layer.name}_output_{i}"

    def get_layers(self):
        from tensorrt_llm.graph_rewriting import Layer

        for i in range(self.trt_network.num_layers):
            yield Layer(self, self.trt_network.get_layer(i))


@contextmanager
def net_guard(network):
    assert isinstance(network, Network)
    before = _common.net
    _common.set_network(network)
    yield
    _common.set_network(before)
