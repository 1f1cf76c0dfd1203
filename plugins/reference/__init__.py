"""Plain torch implementations of the plugin contracts, for any device and dtype.

They replay the recurrence token by token, so that each line can be held against the formula in the contract. float64
pools are computed in float64, everything else in float32. The CUDA kernels are tested against these.
"""
