"""Benchmarks of the CUDA kernels, beside the kernels of other projects.

``python -m benchmarks --help`` lists the commands. ``cases`` says what is measured and how many bytes it has to move,
``problem`` makes its tensors, ``ours`` and ``peers`` are the implementations behind one interface (``subject``), ``measure``
checks each against the float64 reference and times it, ``report`` and ``plots`` show the result. Nothing of the package
imports from here.
"""
