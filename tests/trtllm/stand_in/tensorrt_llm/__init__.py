"""Stands in for tensorrt-llm 1.2, which is on no index that tests have: what ``trtllm-build`` calls on a model class.

Names, signatures, checks and the order of steps are those of the real package; its code is not in here. The network
definition is genuine, TensorRT-RTX's. Where the real package adds a plugin of its own, the network is cut open.
"""

__version__ = "1.2.1"
