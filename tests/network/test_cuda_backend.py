"""``CudaNetwork`` computes what ``TorchNetwork`` does, whatever it defers; its kernels are stood in for by torch."""

from __future__ import annotations

import pytest
import synthetic
import torch
from network.cuda_kernels import kernels_in_torch
from torch import Tensor

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.cuda_backend import CudaNetwork
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.implementation import reference
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.validation.catalogue import MODELS
from trtllm_replayssm.validation.models import random_weights

REPLAY = ReplayConfig(window=8, max_draft_len=3)


def test_every_layer_alone_and_all_together():
    for chosen in (*((layer,) for layer in synthetic.LAYERS), synthetic.LAYERS):
        decoder = synthetic.decoder(chosen)
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(p.shape, generator=generator) * (0.3 if len(p.shape) == 1 else p.shape[-1] ** -0.5) + 0.1
            for name, p in decoder.parameters().items()
        }
        compare(decoder, weights)


@pytest.mark.parametrize("family", MODELS)
def test_every_family(family: str) -> None:
    model = MODELS[family]
    decoder = find_family({"architectures": [model.model_class], **model.arguments}, {}).decoder()
    compare(decoder, random_weights(decoder))


def compare(decoder: HybridDecoder, weights: dict[str, Tensor]) -> None:
    """Two steps of both networks: equal logits of the rows that are in use, and equal state."""
    options = StateOptions(REPLAY, torch.float32, 20)
    ids = torch.randint(0, decoder.vocab_size, (3, 4), generator=torch.Generator().manual_seed(0)).int()

    def logits(kind: type[TorchNetwork]) -> tuple[Tensor, dict[str, Tensor]]:
        pools, out = {name: pool.allocate(3) for name, pool in decoder.pools(options).items()}, []
        for committed in (0, 3):
            step = torch.zeros(3, STEP_WORDS, dtype=torch.int32)
            step[:, Step.SLOT] = torch.tensor([0, -1, 2])
            step[:, Step.COMMITTED], step[:, Step.FOLD_TO], step[:, Step.QUERY_LEN] = committed, 0, 4
            net = kind(weights, pools, step, torch.float32, 10, None, reference())
            out.append(torch.as_tensor(decoder.forward(net, ids, REPLAY) + 0.0)[::2])
        return torch.cat(out), pools

    want, pools = logits(TorchNetwork)
    with kernels_in_torch():
        got, ours = logits(CudaNetwork)
    names = [layer.kind for layer in decoder.layers]
    assert want.isfinite().all()
    assert torch.allclose(got, want, atol=2e-4, rtol=1e-4), (names, float((got - want).abs().max()))
    for name in pools:
        assert torch.allclose(ours[name], pools[name], atol=1e-4), name
