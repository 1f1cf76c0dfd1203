"""Qwen3-Next: Qwen's hybrid with fused projections grouped by key head, and a MoE that may leave layers dense."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.builders.families.base import Source
from trtllm_replayssm.builders.families.qwen import Qwen
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta


class Qwen3Next(Qwen):
    """Tensors ``model.layers.N.{linear_attn, self_attn, mlp}.*``; MTP under ``mtp``."""

    architectures = ("Qwen3NextForCausalLM",)

    def sparse(self, index: int) -> bool:
        config = self.config
        dense = config.get("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise config.fail("mlp_only_layers", f"is {dense!r}; expected a list of layer numbers")
        step = config.positive("decoder_sparse_step", 1)
        # Read only by dense layers.
        config.ignore("intermediate_size")
        return config.positive("num_experts") > 0 and index not in dense and (index + 1) % step == 0

    def announced_mtp(self) -> None:
        """Published configs do not mention the MTP layer that the checkpoints hold."""

    def in_proj(self, prefix: str, layer: GatedDelta) -> Source:
        """qkvz has per key head the rows of q, k, and of v and z of its value heads; ba those of b and a."""
        heads, ratio = layer.num_key_heads, layer.num_value_heads // layer.num_key_heads
        values = ratio * layer.value_dim

        def pack(qkvz: Tensor, ba: Tensor) -> Tensor:
            grouped = qkvz.unflatten(0, (heads, -1)).split([layer.key_dim, layer.key_dim, values, values], 1)
            gates = ba.unflatten(0, (heads, -1)).split([ratio, ratio], 1)
            return torch.cat([part.flatten(0, 1) for part in (*grouped, *gates)])

        return Source((f"{prefix}in_proj_qkvz.weight", f"{prefix}in_proj_ba.weight"), pack)
