"""Tiny random models of every family, made by transformers: the ground truth of the parity tests.

Of Kimi-K3, which transformers does not have, it is an own plain computation (kimi_k3_reference.py).

Every parameter is drawn anew. The initial values of transformers (norms 1, biases 0, residual branches near 0) would hide
swapped norms, missing biases and a forgotten ``1 + w``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import kimi_k3_model
import kimi_k3_reference
import torch
import transformers
from torch import Tensor, nn

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 128
#: Ids below are special, ids above are image and video tokens of the wrappers.
TEXT_IDS = (3, 110)


# ---- where transformers is not the truth -----------------------------------------------------------------------------


def no_dt_floor(model: nn.Module) -> None:
    """transformers clamps the time step of Nemotron-H to time_step_min in its scan, and not in its one-token step.

    The published remote code, and everything that serves the model, use the file's limits (0, inf).
    """
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = (0.0, math.inf)


def ling_swiglu_limits(model: nn.Module) -> None:
    """Ling-3.0-flash was trained with clamped SwiGLU, by lists in its config.json that transformers does not read."""

    def limited(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
        hidden = nn.functional.silu(x @ gate.T).clamp(max=limit) * (x @ up.T).clamp(-limit, limit)
        return hidden @ down.T

    def limit_routed(experts: Any, limit: float) -> None:
        def forward(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            rows = []
            for token, chosen, shares in zip(x, indices.tolist(), weights):
                parts = [(*experts.gate_up_proj[e].chunk(2), experts.down_proj[e]) for e in chosen]
                rows.append(sum(share * limited(token, *part, limit) for share, part in zip(shares, parts)))
            return torch.stack(rows)

        experts.forward = forward

    def limit_shared(mlp: Any, limit: float) -> None:
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        mlp.forward = lambda x: limited(x, *weights, limit)

    config: Any = model.config
    for mlp, routed, shared in zip(
        (layer.mlp for layer in model.model.layers),
        config.expert_swiglu_limit_list,
        config.share_expert_swiglu_limit_list,
    ):
        if routed:
            limit_routed(mlp.experts, routed)
        if shared:
            limit_shared(mlp.shared_experts, shared)


def state_spaces_files(model: nn.Module) -> None:
    """The published model is spelled as its training package spells it, not as transformers does."""
    model.hub_spelling = "state_spaces"


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyModel:
    """``config`` of a transformers class ``name``Config for ``architecture``; ``correct`` mends the built model."""

    config_class: str
    architecture: str
    config: dict[str, Any]
    correct: Callable[[nn.Module], None] = lambda model: None

    def model(self, values: dict[str, Any], seed: int) -> Any:
        model = getattr(transformers, self.architecture)._from_config(
            getattr(transformers, self.config_class)(**values), attn_implementation="eager"
        )
        model.tie_weights()
        redraw(model, seed)
        self.correct(model)
        return model.eval()


@dataclass(frozen=True)
class TinyKimiK3:
    """config: of the text model. wrapped: as published, inside a multimodal config; A_log is padded only there."""

    config: dict[str, Any]
    wrapped: bool = True

    def model(self, values: dict[str, Any], seed: int) -> Any:
        generator, prefix = torch.Generator().manual_seed(seed), "language_model." if self.wrapped else ""
        tensors = {}
        for name, shape in kimi_k3_reference.shapes(values, prefix, padded=self.wrapped).items():
            tensors[name] = drawn(name, torch.empty(shape), False, generator)
            if name.endswith("A_log"):
                tensors[name][values["linear_attn_config"]["num_heads"] :] = 0
        return kimi_k3_model.KimiK3Model(values, tensors, self.wrapped)


COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MAMBA2 = COMMON | {
    "num_hidden_layers": 3,
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 16,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
}
NEMOTRON = COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "expand": 2,
    "use_conv_bias": True,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
GATED_DELTA = COMMON | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
}
QWEN_MOE = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
QWEN35 = GATED_DELTA | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
WRAPPER = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
PREFIXED_MAMBA2 = COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
GRANITE = PREFIXED_MAMBA2 | {
    "num_hidden_layers": 4,
    "mamba_n_groups": 1,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 0.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.0625,
    "shared_intermediate_size": 48,
    "intermediate_size": 32,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "tie_word_embeddings": True,
}
FALCON_H1 = PREFIXED_MAMBA2 | {
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 2,
    "mamba_norm_before_gate": False,
    "lm_head_multiplier": 0.9,
    "embedding_multiplier": 0.6,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [1.35, 0.8, 1.2, 0.7, 1.4],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 1.3,
}
OLMO_HYBRID = COMMON | {
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
}
LATENT = COMMON | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LING = LATENT | {
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "head_dim": 16,
    "num_experts_per_token": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
}
#: Eight index heads and more: with few, whole blocks score exactly 0, and transformers leaves open which of equal ones win.
GLM = {key: value for key, value in LATENT.items() if key not in ("num_experts", "num_shared_experts")} | {
    "num_hidden_layers": 4,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 0,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swiglu_limit": 0.7,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 12,
    "index_kpool": 4,
    "max_position_embeddings": 512,
}
QWEN4 = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 97,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
}
KIMI = LATENT | {
    "num_hidden_layers": 4,
    "num_experts_per_token": 3,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}


def nemotron(pattern: str, **changes: Any) -> TinyModel:
    config = NEMOTRON | {"hybrid_override_pattern": pattern} | changes
    return TinyModel("NemotronHConfig", "NemotronHForCausalLM", config, no_dt_floor)


def ling(**changes: Any) -> TinyModel:
    correct = ling_swiglu_limits if "expert_swiglu_limit_list" in changes else lambda model: None
    return TinyModel("BailingHybridConfig", "BailingHybridForCausalLM", LING | changes, correct)


def granite(**changes: Any) -> TinyModel:
    return TinyModel("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", GRANITE | changes)


def falcon_h1(**changes: Any) -> TinyModel:
    return TinyModel("FalconH1Config", "FalconH1ForCausalLM", FALCON_H1 | changes)


def olmo_hybrid(theta: float | None) -> TinyModel:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return TinyModel("OlmoHybridConfig", "OlmoHybridForCausalLM", OLMO_HYBRID | rope)


MODELS: dict[str, TinyModel | TinyKimiK3] = {
    # Codestral-Mamba: two groups, an untied head.
    "mamba2": TinyModel("Mamba2Config", "Mamba2ForCausalLM", MAMBA2 | {"n_groups": 2, "residual_in_fp32": False}),
    # As state-spaces trained them: one group, projection biases, float32 residual, tied head.
    "mamba2_g1_bias": TinyModel(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        MAMBA2 | {"n_groups": 1, "residual_in_fp32": True, "use_bias": True, "tie_word_embeddings": True},
    ),
    # The files of state-spaces: an embedding with rows behind the vocabulary.
    "state_spaces": TinyModel(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        MAMBA2 | {"n_groups": 1, "residual_in_fp32": True, "use_bias": False, "tie_word_embeddings": True},
        state_spaces_files,
    ),
    "granite4_dense": granite(),
    "granite4_moe": granite(num_local_experts=8, num_experts_per_tok=3),
    # Members of the family that have no recurrent layer rotate.
    "granite4_attention": granite(layer_types=["full_attention"] * 4, position_embedding_type="rope"),
    "falcon_h1": falcon_h1(mamba_rms_norm=False),
    "falcon_h1_norm": falcon_h1(mamba_rms_norm=True, mamba_d_ssm=96, mamba_n_heads=6),
    "falcon_h1_norm_g1": falcon_h1(mamba_rms_norm=True, mamba_n_groups=1, tie_word_embeddings=True),
    "bamba": TinyModel(
        "BambaConfig",
        "BambaForCausalLM",
        PREFIXED_MAMBA2
        | {"num_hidden_layers": 3, "mamba_n_groups": 2, "intermediate_size": 96, "attn_layer_indices": [1]},
    ),
    "nemotron_h_dense": nemotron("M-M-M*-M-"),
    "nemotron_h_moe": nemotron("MEMEM*EME"),
    "nemotron_h_latent": nemotron(
        "MEMEM*EME",
        moe_latent_size=16,
        routed_scaling_factor=5.0,
        moe_shared_expert_overlap=False,
        num_nextn_predict_layers=1,
        mtp_hybrid_override_pattern="*E",
    ),
    # As in 3 Nano, heads x head_dim is not expand x hidden.
    "nemotron_h_wide_inner": nemotron("ME*M-", mamba_num_heads=12),
    "qwen3_next": TinyModel(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        GATED_DELTA
        | QWEN_MOE
        | {"intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True}
        | {"rope_parameters": ROPE},
    ),
    "qwen3_5_text": TinyModel("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", QWEN35 | {"intermediate_size": 96}),
    # The 27B has three value heads per key head; the small ones are tied.
    "qwen3_5_text_tied_v3": TinyModel(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        QWEN35 | {"linear_num_value_heads": 6, "intermediate_size": 96, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": TinyModel("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", QWEN35 | QWEN_MOE),
    "qwen3_5_vl": TinyModel(
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        WRAPPER | {"text_config": QWEN35 | {"intermediate_size": 96}},
    ),
    "qwen3_5_moe_vl": TinyModel(
        "Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", WRAPPER | {"text_config": QWEN35 | QWEN_MOE}
    ),
    # As released, without RoPE; the class can rotate, too.
    "olmo_hybrid": olmo_hybrid(None),
    "olmo_hybrid_rope": olmo_hybrid(5e5),
    "lara_mini": TinyModel(
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        GATED_DELTA
        | QWEN_MOE
        | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "qwen4_exp_text": TinyModel("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", QWEN35 | QWEN_MOE | QWEN4),
    # Two n-gram embeddings, more streams, other blocks, a table in parts of unequal size.
    "qwen4_exp_vl": TinyModel(
        "Qwen4ExpConfig",
        "Qwen4ExpForConditionalGeneration",
        WRAPPER
        | {
            "text_config": QWEN35
            | QWEN_MOE
            | QWEN4
            | {"hc_count": 3, "ple_layer_ids": [3, 1], "ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 48}
            | {"output_gate_type": None, "indexer_compress_ratio": 8, "split_ngram_parts": 3}
        },
    ),
    "kimi_linear": TinyModel("KimiLinearConfig", "KimiLinearForCausalLM", KIMI),
    "kimi_k3": TinyKimiK3(kimi_k3_model.TEXT),
    # What the model's code also allows: a latent without its norm, an unbounded up, low-rank gates, groups, and so on.
    "kimi_k3_text": TinyKimiK3(
        kimi_k3_model.TEXT
        | {"attn_res_block_size": 1, "latent_moe_use_norm": False, "num_experts_per_token": 1, "q_lora_rank": None}
        | {"activation_situ_beta": None, "activation_situ_linear_beta": None, "num_shared_experts": 0}
        | {"num_expert_group": 4, "topk_group": 2}
        | {
            "linear_attn_config": kimi_k3_model.TEXT["linear_attn_config"]
            | {"gate_lower_bound": None, "use_full_rank_gate": False}
        },
        wrapped=False,
    ),
    # Blocks of four tokens, of which four are chosen, so that longer texts are attended to in part.
    "glm5_next": TinyModel(
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        {
            "text_config": GLM,
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "num_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "projection_intermediate_size": 64,
            },
            "image_token_id": 120,
            "video_token_id": 121,
            "image_start_token_id": 122,
            "image_end_token_id": 123,
            "video_start_token_id": 124,
            "video_end_token_id": 125,
        },
    ),
    "bailing_hybrid": ling(),
    # Limits small enough to bite.
    "bailing_hybrid_clamp": ling(
        expert_swiglu_limit_list=[0, 0, 0.4, 0.4], share_expert_swiglu_limit_list=[0, 0.5, 0, 0.7]
    ),
    # The low-rank query of the small models, and the gate without a bound.
    "bailing_hybrid_qlora": ling(num_hidden_layers=2, q_lora_rank=24, kda_safe_gate=False),
}


#: Beginnings of the names of norms that add 1 to their weight.
ZERO_CENTRED = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen4ExpTextRMSNorm")


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """The model in float32, all parameters drawn with ``seed``. changes: to its config; None leaves a key out."""
    tiny = MODELS[name]
    # The classes change what they are given.
    values = json.loads(json.dumps(tiny.config | changes))
    values = {key: value for key, value in values.items() if key not in changes or value is not None}
    return tiny.model(values, seed)


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Gives every parameter a value that matters; the scales keep activations and logits near 1."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = {
        id(module.weight)
        for module in model.modules()
        if type(module).__name__.startswith(ZERO_CENTRED) and not type(module).__name__.endswith("Gated")
    }
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith(("e_score_correction_bias", "expert_bias"))]
    for name, parameter in [*model.named_parameters(), *biases]:
        parameter.copy_(drawn(name, parameter, id(parameter) in zero_centred, generator))


def drawn(name: str, parameter: Tensor, zero_centred: bool, generator: torch.Generator) -> Tensor:
    leaf = name.rpartition(".")[2]
    normal, uniform = (f(parameter.shape, generator=generator) for f in (torch.randn, torch.rand))
    if zero_centred:
        return 0.2 * normal
    if leaf == "A_log":
        return torch.log(0.5 + 7.5 * uniform)
    if leaf == "dt_bias":
        # Inverse softplus of time steps between 1e-5 and 1e-1; a floor of 1e-3 would show.
        dt = torch.exp(math.log(1e-5) + math.log(1e4) * uniform)
        return dt + torch.log(-torch.expm1(-dt))
    if leaf in ("e_score_correction_bias", "expert_bias"):
        return 0.05 * normal
    if leaf == "D" or ("norm" in name and parameter.ndim == 1):
        return 1 + 0.2 * normal
    if leaf == "bias":
        return 0.1 * normal
    if "conv" in name and parameter.ndim == 3:
        return 0.4 * normal
    if "kv_a_proj" in name:
        # A small latent, so that the epsilon of its norm shows; the rope channels behind it are not normed.
        normal[: LATENT["kv_lora_rank"]] *= 0.01
    return normal if "embed" in name else normal / math.sqrt(parameter.shape[-1])


def random_ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(*TEXT_IDS, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor) -> Tensor:
    """float32 ``[rows, T, vocab]`` of one forward pass without a cache."""
    return model(input_ids=ids, use_cache=False).logits.float()
