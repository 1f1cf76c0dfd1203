"""``CudaNetwork`` computes what ``TorchNetwork`` does, whatever it defers; its kernels are stood in for by torch."""

from __future__ import annotations

import synthetic
import torch
from network.cuda_kernels import kernels_in_torch
from torch import Tensor

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.network.cuda_backend import CudaNetwork
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.cursors import STEP_WORDS, Step
from trtllm_replayssm.plugins.implementation import reference
from trtllm_replayssm.replay import ReplayConfig

REPLAY = ReplayConfig(window=8, max_draft_len=3)


def test_every_layer_alone_and_all_together():
    layers = synthetic.LAYERS
    for chosen in (*((layer,) for layer in layers), layers):
        decoder = synthetic.decoder(chosen)
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(p.shape, generator=generator) * (0.3 if len(p.shape) == 1 else p.shape[-1] ** -0.5) + 0.1
            for name, p in decoder.parameters().items()
        }
        options = StateOptions(REPLAY, torch.float32, 20)
        ids = torch.randint(0, synthetic.VOCAB_SIZE, (3, 4), generator=generator).int()

        def logits(kind: type[TorchNetwork]) -> tuple[Tensor, dict[str, Tensor]]:
            pools = {name: pool.allocate(3) for name, pool in decoder.pools(options).items()}  # noqa: B023
            net, out = kind, []
            for committed in (0, 3):
                step = torch.zeros(3, STEP_WORDS, dtype=torch.int32)
                step[:, Step.SLOT] = torch.tensor([0, -1, 2])
                step[:, Step.COMMITTED], step[:, Step.FOLD_TO], step[:, Step.QUERY_LEN] = committed, 0, 4
                net = kind(weights, pools, step, torch.float32, 10, None, reference())  # noqa: B023
                out.append(torch.as_tensor(decoder.forward(net, ids, REPLAY) + 0.0)[::2])  # noqa: B023
            return torch.cat(out), pools

        want, pools = logits(TorchNetwork)
        with kernels_in_torch():
            got, ours = logits(CudaNetwork)
        names = [layer.kind for layer in chosen]
        assert want.isfinite().all()
        assert torch.allclose(got, want, atol=2e-4, rtol=1e-4), (names, float((got - want).abs().max()))
        for name in pools:
            assert torch.allclose(ours[name], pools[name], atol=1e-4), name
