"""A small made-up family and its checkpoints, for tests of reading and converting that need no real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtllm_replayssm.builders.families.base import Family, Source, experts, rows
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder

CONFIG = {"architectures": ["TinyForCausalLM"], "model_type": "tiny", "dtype": "float32", "eos_token_id": 2}

LAYERS = (
    Mamba2(4, 8, 16, 2, 4, 1e-5),
    Attention(4, 2, 8, 8**-0.5),
    Mlp(12, "swiglu"),
    Moe(4, 2, 12, "swiglu", "sigmoid"),
)


class TinyFamily(Family):
    """Names of the checkpoint are ours with ``hf.`` before them, except fused projections, which are split."""

    architectures = ("TinyForCausalLM",)
    layers = LAYERS
    vocab_size = 51
    tied = False

    def decoder(self) -> HybridDecoder:
        return HybridDecoder(self.vocab_size, 32, 1e-5, self.layers, tie_embeddings=self.tied)

    def sources(self, decoder: HybridDecoder) -> dict[str, Source]:
        return {name: self.source(name, parameter.shape) for name, parameter in decoder.parameters().items()}

    def source(self, name: str, shape: tuple[int, ...]) -> Source:
        if name.endswith("qkv.weight"):
            return rows(*(f"hf.{name}.{part}" for part in "qkv"))
        if name.endswith("experts.up.weight"):
            return experts(*((f"hf.{name}.{e}.gate", f"hf.{name}.{e}.up") for e in range(shape[0])))
        if name.endswith("experts.down.weight"):
            return experts(*((f"hf.{name}.{e}.down",) for e in range(shape[0])))
        return Source((f"hf.{name}",))

    def dropped(self, name: str) -> str | None:
        return "vision tower" if name.startswith("visual.") else None


def expected_weights(family: TinyFamily) -> dict[str, Tensor]:
    """Random values for every weight over all ranks."""
    generator = torch.Generator().manual_seed(1)
    decoder = family.decoder()
    return {name: torch.randn(p.shape, generator=generator) for name, p in decoder.parameters().items()}


def checkpoint_tensors(weights: dict[str, Tensor], kv_rows: int = 16) -> dict[str, Tensor]:
    """The tensors of the checkpoint that TinyFamily would make ``weights`` from."""
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("qkv.weight"):
            parts = weight.split((weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows))
            tensors |= {f"hf.{name}.{part}": value for part, value in zip("qkv", parts)}
        elif name.endswith("experts.up.weight"):
            for e, expert in enumerate(weight):
                gate, up = expert.chunk(2)
                tensors |= {f"hf.{name}.{e}.gate": gate, f"hf.{name}.{e}.up": up}
        elif name.endswith("experts.down.weight"):
            tensors |= {f"hf.{name}.{e}.down": expert for e, expert in enumerate(weight)}
        else:
            tensors[f"hf.{name}"] = weight
    return {name: tensor.clone() for name, tensor in tensors.items()}


def write_folder(path: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG, shards: int = 0) -> Path:
    """A Hugging Face folder; ``shards`` files with an index, or one file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, path / "model.safetensors")
        return path
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: dict[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
