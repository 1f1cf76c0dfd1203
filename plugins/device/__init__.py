"""CUDA implementations of the plugin contracts, with the signatures of ``reference/``.

Each file chooses the kernel variant and the launch of one plugin (``launch_record``) and lists the variants that are
checked ahead of time (``variants``). The kernels themselves are under ``cuda/``. ``norms``, ``experts`` and ``attention``
belong to no plugin: the embedded engine runs with them what TensorRT has kernels of its own for.
"""
