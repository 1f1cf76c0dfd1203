"""Every op with a shape rule refuses what breaks it, in a message that names the op and the shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trtllm_replayssm.network.base import DYNAMIC, Network, Rope, ShapeError, same
from trtllm_replayssm.network.ngram import NgramHash
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import STEP_WORDS
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes

CONV = CausalConvAttributes(6, 4, 5)
NGRAM = NgramHash(size=2, heads=1, table_rows=7, vocab_size=9, seed=0, index=0, end_token=1)
MAMBA2 = Mamba2Attributes(num_heads=4, head_dim=3, state_size=5, n_groups=2, window=8, ring_rows=8)
GATED_DELTA = GatedDeltaAttributes(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, window=8, ring_rows=8)
KDA = KdaAttributes(num_heads=2, key_dim=3, value_dim=5, window=8, ring_rows=8)


def network() -> TorchNetwork:
    return TorchNetwork({}, {}, torch.zeros(2, STEP_WORDS, dtype=torch.int32), torch.float32, 8)


def t(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


Call = Callable[[Network], object]
BROKEN: list[tuple[str, Call]] = [
    ("linear", lambda n: n.linear(t(2, 1, 5), t(3, 4))),
    ("linear", lambda n: n.linear(t(2, 1, 4), t(3, 4), t(4))),
    ("rms_norm", lambda n: n.rms_norm(t(2, 1, 6), t(5), 1e-5)),
    ("rms_norm", lambda n: n.rms_norm(t(2, 1, 6), t(6), 1e-5, groups=4)),
    ("add", lambda n: n.add(t(2, 1, 6), t(2, 1, 5))),
    ("add", lambda n: n.add(t(2, 1, 6), t(6))),
    ("add_bias", lambda n: n.add_bias(t(2, 1, 6), t(5))),
    ("multiply", lambda n: n.multiply(t(2, 3, 6), t(2, 2, 6))),
    (r"split into \[2, 3\]", lambda n: n.split(t(2, 6), (2, 3))),
    ("slice_last to 7", lambda n: n.slice_last(t(2, 6), 7)),
    (r"unflatten to \[4, 2\]", lambda n: n.unflatten(t(2, 6), (4, 2))),
    (r"unflatten to \[4, -1\]", lambda n: n.unflatten(t(2, 6), (4, -1))),
    ("per_head", lambda n: n.per_head(t(2, 1, 3, 4), t(3, 5, 6))),
    ("per_head", lambda n: n.per_head(t(2, 1, 2, 6), t(3, 5, 6))),
    ("rope over 3", lambda n: n.rope(t(2, 1, 2, 4), Rope(3, 1e4))),
    ("rope over 6", lambda n: n.rope(t(2, 1, 2, 4), Rope(6, 1e4))),
    ("cache_update", lambda n: n.cache_update(t(2, 3, 8, 4), t(2, 1, 2, 4))),
    ("cache_update", lambda n: n.cache_update(t(2, 2, 8, 5), t(2, 1, 2, 4))),
    ("attention", lambda n: n.attention(t(2, 1, 3, 4), t(2, 2, 8, 4), t(2, 2, 8, 4), 1.0)),
    ("attention", lambda n: n.attention(t(2, 1, 4, 4), t(2, 2, 8, 5), t(2, 2, 8, 5), 1.0)),
    ("attention", lambda n: n.attention(t(2, 1, 4, 4), t(2, 2, 8, 4), t(2, 1, 8, 4), 1.0)),
    ("matmul", lambda n: n.matmul(t(2, 1, 3, 4), t(2, 1, 3, 5))),
    ("matmul", lambda n: n.matmul(t(2, 1, 3, 4), t(2, 1, 4, 5), transpose_a=True)),
    ("matmul", lambda n: n.matmul(t(2, 3, 4), t(2, 1, 4, 5))),
    ("doubly_stochastic", lambda n: n.doubly_stochastic(t(2, 1, 3, 4), 2, 1e-6)),
    ("ngram_ids", lambda n: n.ngram_ids(NGRAM, t(2, 1, 1), t(2, 1, 8, 1))),
    ("ngram_ids", lambda n: n.ngram_ids(NGRAM, t(2, 1), t(2, 2, 8, 1))),
    ("block_cache_update", lambda n: n.block_cache_update(t(2, 1, 8, 4), t(2, 1, 2, 4), 4)),
    ("block_cache_update", lambda n: n.block_cache_update(t(2, 1, 8, 5), t(2, 1, 1, 4), 4)),
    ("select_blocks", lambda n: n.select_blocks(t(2, 1, 3, 4), t(2, 1, 8, 5), None, 4, 2)),
    ("select_blocks", lambda n: n.select_blocks(t(2, 1, 3, 4), t(2, 2, 8, 4), None, 4, 2)),
    ("select_blocks", lambda n: n.select_blocks(t(2, 1, 3, 4), t(2, 1, 8, 4), t(2, 1, 4), 4, 2)),
    ("experts", lambda n: n.experts(t(2, 1, 4), t(2, 1, 2), t(2, 1, 2), t(3, 6, 4), t(3, 4, 6), "clamped_swiglu")),
    ("experts", lambda n: n.experts(t(2, 1, 4), t(2, 1, 2), t(2, 1, 2), t(3, 6, 5), t(3, 4, 3), "swiglu")),
    ("experts", lambda n: n.experts(t(2, 1, 4), t(2, 1, 2), t(2, 1, 2), t(3, 6, 4), t(3, 4, 6), "swiglu")),
    ("experts", lambda n: n.experts(t(2, 1, 4), t(2, 1, 2), t(2, 1, 2), t(3, 6, 4), t(2, 4, 6), "relu2")),
    ("causal_conv", lambda n: n.causal_conv(CONV, t(2, 1, 5), t(6, 4), None, t(2, 5, 6))),
    ("causal_conv", lambda n: n.causal_conv(CONV, t(2, 1, 6), t(6, 3), None, t(2, 5, 6))),
    ("causal_conv", lambda n: n.causal_conv(CONV, t(2, 1, 6), t(6, 4), t(5), t(2, 5, 6))),
    ("causal_conv", lambda n: n.causal_conv(CONV, t(2, 1, 6), t(6, 4), None, t(2, 4, 6))),
    ("mamba2", lambda n: n.mamba2(MAMBA2, t(2, 1, 31), t(2, 1, 4), t(4), t(4), t(4), pools(n, MAMBA2))),
    ("mamba2", lambda n: n.mamba2(MAMBA2, t(2, 1, 32), t(2, 1, 3), t(4), t(4), t(4), pools(n, MAMBA2))),
    ("mamba2", lambda n: n.mamba2(MAMBA2, t(2, 1, 32), t(2, 1, 4), t(4), t(3), t(4), pools(n, MAMBA2))),
    ("mamba2", lambda n: n.mamba2(MAMBA2, t(2, 1, 32), t(2, 1, 4), t(4), t(4), t(4), pools(n, MAMBA2, "ring_b"))),
    ("gated_delta", lambda n: delta(n, qkv=t(2, 1, 31))),
    ("gated_delta", lambda n: delta(n, a=t(2, 1, 2))),
    ("gated_delta", lambda n: delta(n, b=t(2, 1, 2))),
    ("gated_delta", lambda n: delta(n, A_log=t(2))),
    ("gated_delta", lambda n: delta(n, pools=pools(n, GATED_DELTA, "state"))),
    ("kda", lambda n: kda(n, qkv=t(2, 1, 21))),
    ("kda", lambda n: kda(n, f=t(2, 1, 2))),
    ("kda", lambda n: kda(n, b=t(2, 1, 6))),
    ("kda", lambda n: kda(n, dt_bias=t(2))),
    ("kda", lambda n: kda(n, pools=pools(n, KDA, "ring_g"))),
]


def pools(net: Network, attributes, broken: str | None = None) -> dict[str, torch.Tensor]:
    """Fitting pools, the one named ``broken`` with one row or channel too few."""
    dtype = torch.float32
    made = {name: pool.allocate(2) for name, pool in attributes.pools(dtype, dtype, dtype).items()}
    return made if broken is None else made | {broken: made[broken][:, :, :-1]}


def delta(net: Network, **changed) -> object:
    fitting = {
        "qkv": t(2, 1, 32),
        "a": t(2, 1, 4),
        "b": t(2, 1, 4),
        "A_log": t(4),
        "dt_bias": t(4),
        "pools": pools(net, GATED_DELTA),
    }
    return net.gated_delta(GATED_DELTA, **(fitting | changed))


def kda(net: Network, **changed) -> object:
    fitting = {
        "qkv": t(2, 1, 22),
        "f": t(2, 1, 6),
        "b": t(2, 1, 2),
        "A_log": t(2),
        "dt_bias": t(6),
        "pools": pools(net, KDA),
    }
    return net.kda(KDA, **(fitting | changed))


@pytest.mark.parametrize(("message", "call"), BROKEN, ids=[f"{i}-{m.split()[0]}" for i, (m, _) in enumerate(BROKEN)])
def test_what_does_not_fit_is_refused(message: str, call: Call) -> None:
    with pytest.raises(ShapeError, match=rf"^{message}.*: shapes do not fit: .*\["):
        call(network())


def test_what_fits_is_accepted() -> None:
    net = network()
    assert net.mamba2(MAMBA2, t(2, 1, 32), t(2, 1, 4), t(4), t(4), t(4), pools(net, MAMBA2)).shape == (2, 1, 12)
    assert delta(net).shape == (2, 1, 20)
    assert kda(net).shape == (2, 1, 10)
    assert net.causal_conv(CONV, t(2, 1, 6), t(6, 4), t(6), t(2, 5, 6)).shape == (2, 1, 6)
    assert net.slice_last(t(2, 6), 6).shape == (2, 6)


@pytest.mark.parametrize(("a", "b", "fits"), [(3, 3, True), (3, 4, False), (DYNAMIC, 4, True), (4, DYNAMIC, True)])
def test_unknown_sizes_fit_everything(a: int, b: int, fits: bool) -> None:
    assert same(a, b) is fits
