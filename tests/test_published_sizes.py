"""A bare config.json of every published size gives its layers, head shapes and recurrent state.

The files in data/configs hold the keys that matter. Of the layers of Nemotron 3 Super only the counts are right, not the
order; of Granite 4 H small, order and factors are not confirmed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.streams import GatedStreams, SinkhornStreams
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.replay import ReplayConfig

CONFIGS = Path(__file__).parent / "data" / "configs"
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """layers: of each kind. billions: of parameters, MTP left out. state_mib: float32 state of one request.

    fields: what the first layer of a kind has.
    """

    layers: dict[str, int]
    hidden: int
    billions: float
    state_mib: float
    fields: dict[str, dict[str, Any]]


def mamba(heads: int, head_dim: int = 64, groups: int = 8) -> dict[str, Any]:
    return {"num_heads": heads, "head_dim": head_dim, "state_size": 128, "n_groups": groups}


def delta(value_heads: int) -> dict[str, Any]:
    return {"num_key_heads": 16, "num_value_heads": value_heads, "key_dim": 128, "value_dim": 128}


def attention(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def latent(heads: int, **more: Any) -> dict[str, Any]:
    return {"num_heads": heads, "nope_dim": 128, "rope_dim": 64, "kv_rank": 512} | more


def moe(experts: int, top_k: int, width: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "top_k": top_k, "intermediate_size": width} | more


SIZES = {
    "nemotron_nano_v2_9b": Size(
        {"mamba2": 27, "attention": 4, "mlp": 25},
        4480,
        8.9,
        135,
        {"mamba2": mamba(128, 80), "attention": attention(40, 8, 128), "mlp": {"intermediate_size": 15680}},
    ),
    "nemotron_3_nano_30b_a3b": Size(
        {"mamba2": 23, "attention": 6, "moe": 23},
        2688,
        31.6,
        46,
        {"mamba2": mamba(64), "attention": attention(32, 2, 128), "moe": moe(128, 6, 1856, routed_scale=2.5)},
    ),
    "nemotron_3_super_120b_a12b": Size(
        {"mamba2": 40, "attention": 8, "moe": 40},
        4096,
        120,
        160,
        {"mamba2": mamba(128), "attention": attention(32, 2, 128), "moe": moe(512, 22, 2688, latent_size=1024)},
    ),
    "qwen3_next_80b_a3b": Size(
        {"gated_delta": 36, "attention": 12, "moe": 48},
        2048,
        80,
        72,
        {"gated_delta": delta(32), "attention": attention(16, 2, 256), "moe": moe(512, 10, 512)},
    ),
    "qwen3_5_27b": Size(
        {"gated_delta": 48, "attention": 16, "mlp": 64},
        5120,
        27,
        144,
        {"gated_delta": delta(48), "attention": attention(24, 4, 256), "mlp": {"intermediate_size": 17408}},
    ),
    "qwen3_5_35b_a3b": Size(
        {"gated_delta": 30, "attention": 10, "moe": 40},
        2048,
        35,
        60,
        {"gated_delta": delta(32), "attention": attention(16, 2, 256), "moe": moe(256, 8, 512)},
    ),
    "qwen3_5_397b_a17b": Size(
        {"gated_delta": 45, "attention": 15, "moe": 60},
        4096,
        397,
        180,
        {"gated_delta": delta(64), "attention": attention(32, 2, 256), "moe": moe(512, 10, 1024)},
    ),
    "kimi_linear_48b_a3b": Size(
        {"kda": 20, "mla": 7, "mlp": 1, "moe": 26},
        2304,
        49,
        40,
        {"kda": {"num_heads": 32, "head_dim": 128}, "mla": latent(32), "moe": moe(256, 8, 1024, routed_scale=2.446)},
    ),
    "kimi_k3": Size(
        {"kda": 69, "mla": 24, "mlp": 1, "moe": 92},
        7168,
        2780,
        414,
        {
            "kda": {"num_heads": 96, "head_dim": 128, "lower_bound": -5.0, "gate_rank": 128, "full_output_gate": True},
            "mla": latent(96, q_rank=1536, gate="element", rope=None, value_dim=128),
            "mlp": {"intermediate_size": 33792, "activation": "situ", "limit": (4.0, 25.0)},
            "moe": moe(896, 16, 3072, latent_size=3584, latent_epsilon=1e-5, limit=(4.0, 25.0)),
        },
    ),
    "glm_5_3_flash": Size(
        {"kda": 34, "mla": 11, "mlp": 3, "moe": 42},
        4096,
        313.3,
        136,
        {
            "kda": {"num_heads": 64, "head_dim": 128, "lower_bound": -5.0, "gate_rank": 128},
            "mla": latent(64, nope_dim=256, rope_dim=0, value_dim=256, q_rank=1536),
            "mlp": {"intermediate_size": 12288, "activation": "clamped_swiglu", "limit": 10.0},
            "moe": moe(288, 8, 2048, routed_scale=2.5, activation="clamped_swiglu", limit=10.0),
        },
    ),
    # 125 billions, and 51 in the tables of n-grams.
    "qwen3_8_flash_next": Size(
        {"gated_delta": 36, "attention": 12, "moe": 48, "ngram": 1},
        2560,
        176,
        108,
        {
            "gated_delta": delta(48) | {"gate": "sigmoid"},
            "attention": attention(24, 2, 256),
            "moe": moe(512, 10, 640),
            "ngram": {"ngram_size": 3, "heads": 8, "full_width": 160, "rows": 320_001_536, "shards": 128, "index": 0},
        },
    ),
    "ling_3_flash": Size(
        {"kda": 35, "mla": 7, "mlp": 2, "moe": 40},
        2560,
        124,
        70,
        {
            "kda": {"num_heads": 32, "head_dim": 128, "lower_bound": -5.0},
            "mla": latent(32, q_rank=None, gate="head"),
            "moe": moe(512, 8, 768, n_group=8, topk_group=4, routed_scale=2.5),
        },
    ),
    "ling_3_tiny": Size(
        {"kda": 18, "mla": 6, "mlp": 1, "moe": 23},
        1536,
        7.9,
        18,
        {
            "kda": {"num_heads": 16, "head_dim": 128},
            "mla": latent(16, q_rank=256),
            "mlp": {"intermediate_size": 4608},
            "moe": moe(128, 8, 512),
        },
    ),
    "codestral_mamba_7b": Size({"mamba2": 64}, 4096, 7.3, 256, {"mamba2": mamba(128)}),
    "mamba2_2_7b": Size({"mamba2": 64}, 2560, 2.7, 160, {"mamba2": mamba(80, groups=1)}),
    "granite_4_h_small": Size(
        {"mamba2": 36, "attention": 4, "moe": 40},
        4096,
        32,
        144,
        {
            "mamba2": mamba(128, groups=1) | {"output_scale": 0.22},
            "attention": attention(32, 8, 128) | {"scale": 1 / 128, "rope": None},
            "moe": moe(72, 10, 768, output_scale=0.22),
        },
    ),
    "falcon_h1_0_5b": Size(
        {"mamba2": 36, "attention": 36, "mlp": 36},
        1024,
        0.52,
        27,
        {
            "mamba2": mamba(24, groups=1) | {"norm_epsilon": None},
            "attention": attention(8, 2, 64) | {"rope": Rope(64, 1e11)},
            "mlp": {"intermediate_size": 2048},
        },
    ),
    "bamba_9b": Size(
        {"mamba2": 29, "attention": 3, "mlp": 32},
        4096,
        9.8,
        116,
        {"mamba2": mamba(128, groups=1), "attention": attention(32, 8, 128) | {"rope": Rope(64, 1e4)}},
    ),
    "olmo_hybrid_7b": Size(
        {"gated_delta": 24, "attention": 8, "mlp": 32},
        3840,
        7.4,
        50.625,
        {
            "gated_delta": {"num_key_heads": 30, "num_value_heads": 30, "key_dim": 96, "value_dim": 192}
            | {"beta_scale": 2.0},
            "attention": attention(30, 30, 128) | {"rope": None, "qk_norm_joint": True, "norm_after": True},
            "mlp": {"intermediate_size": 11008},
        },
    ),
}


def published(name: str) -> HybridDecoder:
    return find_family(read_config(CONFIGS / f"{name}.json"), {}).decoder()


def test_every_file_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_layers_and_shapes(name: str) -> None:
    size, decoder = SIZES[name], published(name)
    layers = [layer for _, layer in decoder.named_parts()]
    assert dict(Counter(layer.kind for layer in layers)) == size.layers
    assert decoder.hidden_size == size.hidden
    for kind, fields in size.fields.items():
        layer = next(layer for layer in layers if layer.kind == kind)
        assert {key: getattr(layer, key) for key in fields} == fields


@pytest.mark.parametrize("name", SIZES)
def test_parameters_add_up_to_the_models_name(name: str) -> None:
    parameters = replace(published(name), mtp=None).parameters().values()
    assert sum(p.elements for p in parameters) / 1e9 == pytest.approx(SIZES[name].billions, rel=0.02)


@pytest.mark.parametrize("name", SIZES)
def test_recurrent_state_of_a_request(name: str) -> None:
    pools = published(name).pools(StateOptions(ReplayConfig(), torch.bfloat16, 1)).values()
    state = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools if pool.kind == "state")
    assert state / MIB == SIZES[name].state_mib


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_hold_half_of_the_state_each(name: str) -> None:
    options = StateOptions(ReplayConfig(), torch.bfloat16, 1)
    whole, half = (published(name).divided(tp).pools(options) for tp in (1, 2))
    assert whole.keys() == half.keys()
    assert any(pool.kind == "state" for pool in whole.values())
    for pool, pool_of_rank in zip(whole.values(), half.values()):
        if pool.kind == "state":
            assert 2 * math.prod(pool_of_rank.shape) == math.prod(pool.shape)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("nemotron_3_super_120b_a12b", ["attention", "moe"]),
        ("qwen3_5_27b", ["attention", "mlp"]),
        ("qwen3_5_35b_a3b", ["attention", "moe"]),
        ("ling_3_flash", ["mla", "moe"]),
        ("glm_5_3_flash", ["mla", "moe"]),
    ],
)
def test_announced_mtp_layers(name: str, kinds: list[str]) -> None:
    mtp = published(name).mtp
    assert mtp is not None
    assert [layer.kind for layer in mtp.layers] == kinds


@pytest.mark.parametrize("name", ["glm_5_3_flash", "qwen3_8_flash_next"])
def test_indexers_choose_512_blocks_of_four(name: str) -> None:
    """The file says so; defaults of transformers would make blocks of 16 of GLM's."""
    chosen = [layer.indexer for layer in published(name).layers if getattr(layer, "indexer", None)]
    assert {(indexer.block, indexer.count, indexer.head_dim) for indexer in chosen} == {(4, 512, 128)}
    assert len(chosen) in (11, 12)


@pytest.mark.parametrize("name", ["glm_5_3_flash", "qwen3_8_flash_next"])
def test_block_keys_take_a_quarter_of_a_key_for_each_token(name: str) -> None:
    decoder = published(name)
    prefix, layer = next(named for named in decoder.named_layers() if getattr(named[1], "indexer", None))
    pool = decoder.pools(StateOptions(ReplayConfig(), torch.bfloat16, 65536))[f"{prefix}.indexer.cache"]
    assert 65536 // 4 <= pool.shape[1] <= 65536 // 4 + 16
    assert pool.shape[2] == layer.indexer.head_dim


def test_streams_of_the_published_models() -> None:
    assert published("glm_5_3_flash").streams == SinkhornStreams(4, 1e-5, 1e-6, 20)
    assert published("qwen3_8_flash_next").streams == GatedStreams(4, 1e-6, 320)


def test_ling_flash_limits_its_last_layers() -> None:
    """Missing these trained limits costs 17 to 20 points of HumanEval."""
    sparse = [layer for layer in published("ling_3_flash").layers if layer.kind == "moe"]
    limits = [(layer.limit, layer.shared.limit) for layer in sparse]
    dense = 2
    assert set(limits[: 34 - dense]) == {(None, None)}
    assert limits[34 - dense :] == [(None, 5.0), *[(4.0, 5.0)] * 5, *[(4.0, 7.0)] * 2]


def test_weights_of_kimi_k3_add_up_to_its_files() -> None:
    """1,560,860,324,864 bytes by the published index: 17 for 32 weights of routed experts, 2 for others, and a vision tower."""
    parameters = published("kimi_k3").parameters()
    experts = sum(p.elements for name, p in parameters.items() if ".moe.experts." in name)
    others = sum(p.elements for p in parameters.values()) - experts
    assert experts * 17 / 32 + others * 2 == pytest.approx(1_560_860_324_864, rel=1e-3)
