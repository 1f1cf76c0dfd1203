"""The plain recurrences in float64: a sequence in, outputs and every state out. No ring, no slots, no steps.

Written from the papers' formulas, one head at a time, and sharing nothing with the package.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool = True) -> torch.Tensor:
    """Causal depthwise convolution of x ``[L, C]`` with weight ``[C, kernel]``, and SiLU."""
    kernel = weight.shape[1]
    padded = F.pad(x.double().T[None], (kernel - 1, 0))
    y = F.conv1d(padded, weight.double()[:, None], None if bias is None else bias.double(), groups=len(weight))[0].T
    return F.silu(y) if silu else y


def mamba2(
    x: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    dt: np.ndarray,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    D: np.ndarray,
    limits: tuple[float, float] = (0.0, math.inf),
    start: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """x ``[L, H, P]``, b and c ``[L, G, N]``, dt ``[L, H]``; outputs ``[L, H, P]``, states ``[L + 1, H, P, N]``.

    start: the first state.
    """
    length, heads, channels = x.shape
    groups, width = b.shape[1:]
    y, states = np.zeros_like(x), np.zeros((length + 1, heads, channels, width))
    states[0] = start
    for h in range(heads):
        group = h * groups // heads
        for t in range(length):
            step = min(max(softplus(dt[t, h] + dt_bias[h]), limits[0]), limits[1])
            decay = np.exp(-np.exp(A_log[h]) * step)
            states[t + 1, h] = decay * states[t, h] + step * np.outer(x[t, h], b[t, group])
            y[t, h] = states[t + 1, h] @ c[t, group] + D[h] * x[t, h]
    return y, states


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, start: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """q and k ``[L, Hk, K]`` as projected, v ``[L, Hv, V]``, g ``[L, Hv, K]``, beta ``[L, Hv]``; start: the first state.

    Outputs ``[L, Hv, V]`` and states ``[L + 1, Hv, V, K]``.
    """
    length, heads, values = v.shape
    key_heads, width = k.shape[1:]
    o, states = np.zeros_like(v), np.zeros((length + 1, heads, values, width))
    states[0] = start
    for h in range(heads):
        shared = h * key_heads // heads
        for t in range(length):
            key = k[t, shared] / math.sqrt(float(np.dot(k[t, shared], k[t, shared])) + 1e-6)
            query = q[t, shared] / math.sqrt(float(np.dot(q[t, shared], q[t, shared])) + 1e-6) / math.sqrt(width)
            decayed = states[t, h] @ np.diag(np.exp(g[t, h]))
            error = beta[t, h] * (v[t, h] - decayed @ key)
            states[t + 1, h] = decayed + np.outer(error, key)
            o[t, h] = states[t + 1, h] @ query
    return o, states


def gated_delta_gates(
    a: np.ndarray, b: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, key_dim: int, beta_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """g, the same for all key channels, and beta from logits ``[L, Hv]``."""
    g = -np.exp(A_log) * softplus(a + dt_bias)
    return np.repeat(g[..., None], key_dim, -1), beta_scale * sigmoid(b)


def kda_gates(
    f: np.ndarray, b: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """g and beta from logits f ``[L, H, K]`` and b ``[L, H]``; dt_bias ``[H, K]``."""
    rate = np.exp(A_log)[:, None]
    g = -rate * softplus(f + dt_bias) if lower_bound is None else lower_bound * sigmoid(rate * (f + dt_bias))
    return g, sigmoid(b)
