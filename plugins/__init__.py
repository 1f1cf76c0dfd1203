"""ReplaySSM plugin layers.

One file per layer holds its contract (tensors, shapes, dtypes, what aliases what) and its attributes; ``reference/`` holds
the plain implementation of each on torch tensors, for any device. The CUDA kernels and the TensorRT layers implement the
same contracts. Nothing in this package knows a model family or an engine.
"""

#: Version of the plugin contracts. An engine records it; another version's engine is refused.
PLUGIN_VERSION = "1"
#: Namespace of the layers in TensorRT's plugin registry.
PLUGIN_NAMESPACE = "replayssm"
