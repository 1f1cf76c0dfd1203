"""Checkpoints and engines of small decoders with random weights, made without a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, rank_file
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine, build_engine

#: Every layer kind, each with its options switched on somewhere; divides over two ranks.
LAYERS: tuple[Layer, ...] = (
    Mamba2(num_heads=8, head_dim=16, state_size=16, n_groups=2, conv_kernel=4, norm_epsilon=1e-5),
    Mlp(96, "relu2"),
    GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_kernel=4, norm_epsilon=1e-6),
    Mlp(96, "swiglu", limit=1.0),
    Kda(num_heads=4, head_dim=16, conv_kernel=4, norm_epsilon=1e-6, lower_bound=-5.0),
    Kda(num_heads=4, head_dim=16, conv_kernel=4, norm_epsilon=1e-6, gate_rank=8),
    Attention(4, 1, 32, 32**-0.5, Rope(8, 1e7), 1e-6, qk_norm_zero_centred=True, output_gate=True),
    Mla(4, 32, 16, 8, 16, 1e-6, q_rank=24, q_epsilon=1e-6, rope=Rope(8, 1e4, interleaved=True), gate="head"),
    Moe(8, 3, 32, "swiglu", "sigmoid", n_group=4, topk_group=2, shared=Mlp(48, "swiglu")),
    Moe(8, 3, 32, "swiglu", "softmax", shared=Mlp(48, "swiglu"), shared_gate=True),
    Moe(8, 3, 32, "relu2", "sigmoid", latent_size=16),
)
#: Head sizes of real models, which the tuned kernels take.
REAL_HEADS = (
    Mamba2(num_heads=8, head_dim=64, state_size=128, n_groups=2, conv_kernel=4, norm_epsilon=1e-5),
    Mlp(96, "relu2"),
    GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128, conv_kernel=4, norm_epsilon=1e-6),
    Mlp(96, "swiglu"),
    Kda(num_heads=2, head_dim=128, conv_kernel=4, norm_epsilon=1e-6),
)
#: Odd, so that two ranks need a padded head.
VOCAB_SIZE = 51


#: Special tokens, one token per byte, and ids that only pad the embedding.
TEXT_TOKENS, TEXT_VOCAB_SIZE = 258, 263


def decoder(
    layers: tuple[Layer, ...] = LAYERS, tie_embeddings: bool = False, vocab_size: int = VOCAB_SIZE
) -> HybridDecoder:
    return HybridDecoder(vocab_size, 64, 1e-5, layers, tie_embeddings=tie_embeddings)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json: ``<s>`` and ``</s>`` (ids 0 and 1), then the 256 bytes of UTF-8."""
    bytes_of_utf8 = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(("<s>", "</s>", *bytes_of_utf8))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def random_weights(model: HybridDecoder, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights over all ranks. Norm scales are near 1, and the logits' standard deviation is near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.parameters().items():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "norm" in name or "ln_f" in name else 0.0
        spread = 0.1 if scale else (1.0 if len(parameter.shape) == 1 else parameter.shape[-1] ** -0.5)
        weights[name] = scale + spread * noise
    return weights


def write_checkpoint(
    folder: Path,
    model: HybridDecoder,
    tp_size: int = 1,
    dtype: str = "float32",
    replay: ReplayConfig | None = None,
    seed: int = 0,
    num_tokens: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> Path:
    """A checkpoint folder of ``model`` with the weights of ``seed``, cut for ``tp_size`` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CheckpointConfig(
        "SyntheticForCausalLM", dtype, tp_size, model, replay or ReplayConfig(), eos_token_ids, num_tokens, 1000
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    weights, parameters = random_weights(model, seed), model.parameters(tp_size)
    if "lm_head.weight" in parameters:
        head = weights.get("lm_head.weight", weights["transformer.vocab_embedding.weight"])
        padding = torch.zeros(model.padded_vocab(tp_size) - len(head), model.hidden_size)
        weights["lm_head.weight"] = torch.cat([head, padding])
    for rank in range(tp_size):
        tensors = {}
        for name, parameter in parameters.items():
            kept = torch.float32 if parameter.float32 else getattr(torch, dtype)
            tensors[name] = parameter.shard(weights[name], rank, tp_size).to(kept).contiguous().clone()
        save_file(tensors, folder / rank_file(rank), metadata={"format": "pt"})
    return folder


def write_engine(
    folder: Path,
    model: HybridDecoder | None = None,
    options: BuildOptions | None = None,
    text: bool = False,
    **checkpoint: Any,
) -> Path:
    """An engine folder of ``model`` (every layer kind by default); the checkpoint is left beside it.

    text: with a tokenizer and the vocabulary it needs, which is padded.
    """
    if text:
        model = model or decoder(vocab_size=TEXT_VOCAB_SIZE)
        checkpoint = {"num_tokens": TEXT_TOKENS, "eos_token_ids": (1,)} | checkpoint
    source = write_checkpoint(folder.with_name(folder.name + ".checkpoint"), model or decoder(), **checkpoint)
    if text:
        write_tokenizer(source)
    build_engine(source, folder, options or BuildOptions(max_batch_size=4, max_seq_len=256, max_num_tokens=1024))
    return folder


def load(folder: Path) -> Engine:
    return Engine.load(folder, device="cpu")


def spoiled(pool: Tensor) -> Tensor:
    """The pool full of what nobody may use: NaN, or -1 where it holds integers."""
    return pool.fill_(float("nan") if pool.is_floating_point() else -1)


def with_replay(engine: Engine, **changes: int | str) -> Engine:
    """The same engine as a build with other ReplaySSM options would have made it."""
    checkpoint = engine.config.checkpoint
    replay = replace(checkpoint.replay, **changes)  # type: ignore[arg-type]
    return replace(engine, config=replace(engine.config, checkpoint=replace(checkpoint, replay=replay)))


def in_float32(engine: Engine) -> Engine:
    """The same weights, computed in float32."""
    checkpoint = replace(engine.config.checkpoint, dtype="float32")
    weights = {name: weight.float() for name, weight in engine.weights.items()}
    return replace(engine, config=replace(engine.config, checkpoint=checkpoint), weights=weights)
