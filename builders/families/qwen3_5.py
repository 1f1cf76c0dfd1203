"""Qwen3.5, 3.6 and 3.8, dense and MoE: the text model, alone or inside the multimodal wrapper."""

from __future__ import annotations

from typing import ClassVar

from trtllm_replayssm.builders.families.base import Source, rows
from trtllm_replayssm.builders.families.qwen import Qwen
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta


class Qwen35(Qwen):
    """Tensors ``model.layers.N.*``, in wrappers ``model.language_model.layers.N.*`` beside ``model.visual.*``."""

    architectures: ClassVar[tuple[str, ...]] = (
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    )

    def sparse(self, index: int) -> bool:
        # These models route in every layer or in none, and always normalise.
        self.config.expect("mlp_only_layers", [])
        self.config.expect("decoder_sparse_step", 1)
        self.config.expect("norm_topk_prob", True)
        moe = super().sparse(index)
        if moe:
            self.config.ignore("intermediate_size")
        return moe

    def in_proj(self, prefix: str, layer: GatedDelta) -> Source:
        return rows(*(f"{prefix}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")))
