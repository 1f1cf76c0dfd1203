"""Passes over a finished network. The real package's visits every layer, and knows the kinds that its own models use."""

from functools import wraps

from tensorrt_llm._common import default_net
from tensorrt_llm.trt import trt

KNOWN = (
    "CONVOLUTION ACTIVATION POOLING LRN SCALE SOFTMAX DECONVOLUTION CONCATENATION ELEMENTWISE UNARY PADDING SHUFFLE REDUCE "
    "TOPK GATHER MATRIX_MULTIPLY RAGGED_SOFTMAX CONSTANT IDENTITY SLICE SHAPE PARAMETRIC_RELU RESIZE SELECT FILL QUANTIZE "
    "DEQUANTIZE SCATTER EINSUM ONE_HOT NON_ZERO NORMALIZATION CAST"
)


class Layer:
    TRT_LAYER_TYPE_TO_LAYER = {getattr(trt.LayerType, name): trt.ILayer for name in KNOWN.split()}

    def __init__(self, network, trt_layer):
        assert isinstance(trt_layer, trt.ILayer)
        self.network, self.trt_layer = network, trt_layer

    @property
    def type(self):
        return trt.ILayer.type.__get__(self.trt_layer)

    def as_layer(self):
        if self.type in self.TRT_LAYER_TYPE_TO_LAYER:
            self.trt_layer.__class__ = self.TRT_LAYER_TYPE_TO_LAYER[self.type]
            return self.trt_layer
        raise NotImplementedError(f"Unknown layer type: {self.type}")


def record_signature(function):
    """Notes the arguments of an attention layer under the layer's name."""

    @wraps(function)
    def recorded(**arguments):
        outputs = function(**arguments)
        default_net().flayers[outputs[0].producer.name] = arguments
        return outputs

    return recorded


def optimize(network):
    """Looks at every layer, and at what feeds an attention layer."""
    for layer in network.get_layers():
        arguments = network.flayers.get(layer.as_layer().name)
        if arguments is not None:
            # Dictionaries of the real pass are keyed by wrapped tensors; an unwrapped one would add layers.
            assert arguments["qkv"].is_tensor_wrapper or hasattr(arguments["qkv"], "producer")
