"""A tiny Kimi-K3 that looks to tests like a model of transformers: it has a config, writes a folder, and computes logits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kimi_k3_reference as reference
import torch
from safetensors.torch import save_file
from torch import Tensor

#: Five layers in blocks of two, so that sums of two whole blocks and of a part are mixed. Bounds of SiTU that bite.
TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "hidden_act": "situ",
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 2.0,
    "intermediate_size": 96,
    "attn_res_block_size": 2,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "moe_intermediate_size": 32,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Defaults of generation that transformers 4 writes into nested configs.
    "max_length": 20,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}
#: What the published file has around the text model.
WRAPPER = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "auto_map": {"AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
    "tie_word_embeddings": False,
    "media_placeholder_token_id": 125,
    "ignore_index": -100,
    "eos_token_id": 2,
    "vision_config": {"vt_hidden_size": 32, "patch_size": 4},
}
#: Of the vision tower and of what joins it to the text.
VISION = {"vision_tower.patch_embed.proj.weight": (32, 3, 4, 4), "mm_projector.proj.0.weight": (64, 128)}


class KimiK3Model:
    """text: the text config. tensors: float32, by their published names. wrapped: whether the config is the multimodal one."""

    hub_spelling = "kimi_k3"

    def __init__(self, text: dict[str, Any], tensors: dict[str, Tensor], wrapped: bool) -> None:
        self.text, self.tensors, self.wrapped = text, tensors, wrapped
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = WRAPPER | {"text_config": self.text} if self.wrapped else self.text
        (folder / "config.json").write_text(json.dumps(config))
        vision = {name: torch.ones(shape) for name, shape in VISION.items()} if self.wrapped else {}
        save_file(self.tensors | vision, folder / "model.safetensors", metadata={"format": "pt"})

    def __call__(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """Logits in float64, of one forward pass without a cache."""
        tensors = {name: tensor.double() for name, tensor in self.tensors.items()}
        return SimpleNamespace(logits=reference.logits(self.text, tensors, input_ids))
