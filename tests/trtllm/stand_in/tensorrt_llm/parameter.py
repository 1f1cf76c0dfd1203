"""A weight: a numpy array, or a shape until one comes."""

import numpy as np
import torch

from tensorrt_llm._utils import NUMPY, np_bfloat16, str_dtype_to_trt, torch_to_numpy


class Parameter:
    def __init__(self, value=None, shape=None, dtype=None, is_buffer=False, prefer_managed=False):
        assert value is None and isinstance(shape, list | tuple)
        self.shape, self.dtype, self.is_buffer = tuple(shape), str_dtype_to_trt(dtype), is_buffer
        self._name, self._value = dtype, None

    def is_inited(self):
        return self._value is not None

    def is_managed(self, network):
        return False

    def _get_weights(self, network):
        return network.get_parameter_tensor(self)

    @property
    def raw_value(self):
        if self._value is None:
            dtype = np_bfloat16 if self._name == "bfloat16" else np.dtype(self._name)
            self._value = np.zeros(self.shape, dtype)
        return self._value

    @property
    def value(self):
        raise AssertionError("no layer of TensorRT-LLM reads these weights")

    @value.setter
    def value(self, v):
        v = torch_to_numpy(v) if isinstance(v, torch.Tensor) else v
        assert v.shape == self.shape, f"shape {v.shape}, expected {self.shape}"
        assert NUMPY[v.dtype] == self._name, f"dtype {v.dtype}, expected {self._name}"
        self._value = v
