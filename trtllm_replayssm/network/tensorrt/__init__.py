"""The op vocabulary as TensorRT layers.

``backend`` implements ``network.base`` on ``emitter``, which adds single layers; ``attention`` and ``experts`` hold the two
ops that take more than a few; ``state`` gives pools and step inputs their tensors; ``plugin_layer`` says what a plugin
layer is to the network; ``build`` makes profiles and plans. TensorRT itself is reached only through the module that
``compat`` found, so that importing this package needs none.
"""
