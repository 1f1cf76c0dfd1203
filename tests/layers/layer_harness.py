"""Runs one layer as an engine does, on one rank or on several ranks in threads."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from synthetic import spoiled
from torch import Tensor

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer, StateOptions, StreamLayer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.indexer import MeanIndexer, PooledIndexer
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.layers.ngram import NgramEmbedding
from trtllm_replayssm.builders.layers.side_by_side import SideBySide
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, Cursor, RowMode
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.replay import ReplayConfig

HIDDEN, TOKENS, ROWS = 32, 40, 2
#: The token behind which n-grams begin anew.
END = 3
REPLAY = ReplayConfig(window=8, max_draft_len=3)
#: (T, accepted, mode) of each step: prefill in two chunks, verify steps with rejections, decode, forced flush.
PLAN = [
    (7, 7, 2),
    (4, 4, 2),
    (4, 2, 0),
    (4, 4, 0),
    (1, 1, 0),
    (3, 1, 0),
    (4, 4, 1),
    (2, 2, 0),
    (4, 3, 0),
    (4, 4, 0),
    (1, 1, 0),
]

LAYERS: dict[str, Layer] = {
    "mamba2": Mamba2(8, 4, 6, 4, 4, 1e-5, conv_bias=True, proj_bias=True, dt_min=0.01, dt_max=1.5),
    "mamba2_plain": Mamba2(8, 4, 6, 4, 3, 1e-5, conv_bias=False),
    "mamba2_one_group": Mamba2(8, 4, 6, 1, 4, 1e-3),
    "mamba2_scaled": Mamba2(8, 4, 6, 4, 4, None, proj_bias=True, scales=(1.35, 0.8, 1.2, 0.7, 1.4)),
    "gated_delta": GatedDelta(4, 8, 6, 5, 4, 1e-6),
    "gated_delta_negative": GatedDelta(4, 4, 6, 5, 4, 1e-6, beta_scale=2.0, gate="sigmoid"),
    "kda": Kda(4, 6, 4, 1e-6),
    "kda_bounded_low_rank": Kda(4, 6, 4, 1e-6, -5.0, 3, conv_float32=True),
    "kda_full_output_gate": Kda(4, 6, 4, 1e-6, -5.0, 3, full_output_gate=True, norm_float32=True),
    "attention": Attention(8, 2, 8, 8**-0.5),
    "attention_gated": Attention(8, 4, 8, 0.3, Rope(4, 1e4), 1e-6, True, True, bias=True),
    "attention_window": Attention(8, 2, 8, 0.3, Rope(8, 1e4), window=5),
    "attention_joint_norm": Attention(8, 4, 8, 0.3, Rope(8, 1e4), 1e-3, qk_norm_joint=True),
    "mla": Mla(4, 12, 6, 4, 5, 1e-6),
    "mla_rope": Mla(4, 12, 6, 4, 5, 1e-6, 10, 1e-5, Rope(4, 1e4, True), "head"),
    "mla_gated": Mla(4, 12, 6, 4, 5, 1e-6, gate="element"),
    "attention_indexed": Attention(4, 2, 8, 0.3, Rope(4, 1e4), indexer=MeanIndexer(8, 6, 3, 2, 1e-6, Rope(4, 1e4))),
    "mla_indexed": Mla(4, 12, 6, 0, 5, 1e-6, 10, 1e-5, indexer=PooledIndexer(8, 6, 4, 2, 1e-5)),
    "mla_indexed_rope": Mla(4, 12, 6, 4, 5, 1e-6, 10, 1e-5, Rope(4, 1e4), indexer=PooledIndexer(8, 6, 2, 3, 1e-5)),
    "ngram": NgramEmbedding(2, HIDDEN, 3, 2, 23, 50, 7, 0, END, 120, 3, 8, 8, 4, 1e-6),
    "ngram_whole": NgramEmbedding(4, HIDDEN, 2, 3, 11, 50, 8, 1, END, 180, 1, 4, 4, 1, 1e-6),
    "mlp": Mlp(16, "swiglu"),
    "mlp_clamped": Mlp(16, "clamped_swiglu", limit=0.1),
    "mlp_situ": Mlp(16, "situ", limit=(0.4, 0.3)),
    "mlp_situ_unbounded": Mlp(16, "situ", limit=(0.4, None)),
    "mlp_limit_apart": Mlp(16, "swiglu", limit=(0.1, 0.2)),
    "mlp_limit": Mlp(16, "swiglu", limit=0.1),
    "mlp_relu2": Mlp(16, "relu2", bias=True),
    "mlp_scaled": Mlp(16, "swiglu", gate_scale=0.6),
    "moe_softmax": Moe(8, 3, 8, "swiglu", "softmax", shared=Mlp(8, "swiglu"), shared_gate=True),
    "moe_groups": Moe(
        8, 3, 8, "swiglu", "sigmoid", routed_scale=2.5, n_group=4, topk_group=2, limit=0.1, shared=Mlp(12, "swiglu", 0.1)
    ),
    "moe_clamped": Moe(8, 3, 8, "clamped_swiglu", "sigmoid", limit=0.1, shared=Mlp(8, "clamped_swiglu", 0.1)),
    "moe_latent": Moe(8, 2, 8, "relu2", "sigmoid", normalise=False, latent_size=10, shared=Mlp(8, "relu2")),
    "moe_latent_normed": Moe(
        8, 2, 8, "situ", "sigmoid", limit=(0.4, 0.3), latent_size=10, latent_epsilon=1e-3, shared=Mlp(8, "situ", (0.4, 0.3))
    ),
    "moe_latent_normed_alone": Moe(8, 2, 8, "swiglu", "sigmoid", latent_size=10, latent_epsilon=1e-3),
    "side_by_side": SideBySide((
        Mamba2(8, 4, 6, 4, 4, None, input_scale=1.25, output_scale=0.6),
        Attention(8, 4, 8, 0.3, input_scale=0.7, output_scale=1.4),
        Mlp(8, "swiglu", output_scale=0.5),
    )),
}  # fmt: skip


def width_of(layer: Layer) -> int:
    """hidden_size of the layer's model. What it reads has HIDDEN channels, over all of its streams if it reads several."""
    return HIDDEN // layer.streams if isinstance(layer, NgramEmbedding) else HIDDEN


def random_weights(layer: Layer) -> dict[str, Tensor]:
    """Redrawn, so that no norm is 1 and no bias 0; but the taps of an indexer are constants."""
    random, weights = torch.Generator().manual_seed(7), {}
    for name, parameter in layer.parameters(width_of(layer)).items():
        fan_in = parameter.shape[-1] if len(parameter.shape) > 1 else 4
        weights[name] = torch.randn(parameter.shape, generator=random) / math.sqrt(fan_in)
        if name.endswith("norm.weight"):
            weights[name] += 1
    match getattr(layer, "indexer", None):
        case PooledIndexer() as indexer:
            weights["indexer.taps.weight"] = indexer.delays()
        case MeanIndexer() as indexer:
            weights["indexer.taps.weight"] = indexer.mean()
    return weights


def random_input() -> Tensor:
    return torch.randn(ROWS, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8))


def random_tokens() -> Tensor:
    """int32 ``[ROWS, TOKENS]``; some of them end a text."""
    tokens = torch.randint(0, 50, (ROWS, TOKENS), generator=torch.Generator().manual_seed(9))
    return torch.where(tokens % 7 == 0, END, tokens).int()


class RankNetwork(TorchNetwork):
    """One rank of a tensor-parallel group whose ranks are threads."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier, *arguments) -> None:
        super().__init__(*arguments)
        self.rank, self.parts, self.barrier, self.tp_size = rank, parts, barrier, len(parts)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.parts[self.rank] = x
        self.barrier.wait(timeout=60)
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait(timeout=60)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        self.parts[self.rank] = x
        self.barrier.wait(timeout=60)
        everyone = torch.cat(self.parts, -1)
        self.barrier.wait(timeout=60)
        return everyone


def run_rank(
    layer: Layer, weights: dict[str, Tensor], rank: int, parts: list[Tensor | None], barrier: threading.Barrier
) -> Tensor:
    """Accepted outputs ``[ROWS, sum of accepted, HIDDEN]`` of PLAN on the rank's shard, in NaN-filled pools."""
    tp_size, described = len(parts), layer.parameters(width_of(layer))
    local = {f"l.{name}": described[name].shard(value, rank, tp_size) for name, value in weights.items()}
    divided = layer.divided(tp_size)
    pools = divided.pools(StateOptions(REPLAY, torch.float32, TOKENS))
    bound = {f"l.{name}": spoiled(pool.allocate(ROWS)) for name, pool in pools.items()}
    cursors, x, outputs, done = torch.zeros(ROWS, CURSOR_WORDS, dtype=torch.int32), random_input(), [], 0
    rows = torch.arange(ROWS, dtype=torch.int32)
    for tokens, accepted, mode in PLAN:
        chunk = x[:, done : done + tokens].clone()
        chunk[:, accepted:] = 9.0
        lengths, modes = torch.full_like(rows, tokens), torch.full_like(rows, RowMode(mode))
        step = advance(AdvanceAttributes(REPLAY.window), cursors, rows, lengths, modes, tokens)
        net = RankNetwork(rank, parts, barrier, local, bound, step, torch.float32, done + tokens)
        if isinstance(divided, StreamLayer):
            ids = random_tokens()[:, done : done + tokens].clone()
            ids[:, accepted:] = 1
            output = divided.added(net, "l", chunk, ids, REPLAY)
        else:
            output = divided.forward(net, "l", chunk, REPLAY)
        outputs.append(output[:, :accepted])
        cursors[:, Cursor.COMMITTED] += accepted
        done += accepted
    return torch.cat(outputs, 1)


def run(layer: Layer, weights: dict[str, Tensor], tp_size: int = 1) -> list[Tensor]:
    """Every rank's outputs."""
    parts: list[Tensor | None] = [None] * tp_size
    barrier = threading.Barrier(tp_size)
    with ThreadPoolExecutor(tp_size) as ranks:
        pending = [ranks.submit(run_rank, layer, weights, rank, parts, barrier) for rank in range(tp_size)]
        return [future.result() for future in pending]
