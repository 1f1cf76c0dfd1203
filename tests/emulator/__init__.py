"""Runs the CUDA kernels on a CPU: their sources are compiled by the host's C++ compiler, threads are fibers of one thread.

``device/`` has what the sources need instead of CUDA: the language (cuda.h), the instructions (ptx/, in the place of
plugins/cuda/ptx) and the runtime. ``launcher`` compiles and launches, ``torch_device`` lets tests written for a GPU run on it.
"""
