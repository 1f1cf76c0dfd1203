"""The hybrid models of the demo, one for each recurrence: trained ones by name, and tiny ones as arguments of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: 256 bytes behind three special tokens; the embedding has a few rows more, as real ones do.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 272

#: Recurrences of the trained models (examples/train_tiny), by name.
TRAINED = {"mamba2": "Mamba-2", "gated_delta": "Gated DeltaNet", "kda": "Kimi Delta Attention"}

COMMON = dict(vocab_size=VOCAB_SIZE, hidden_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MOE = dict(moe_intermediate_size=32, num_experts=8)


@dataclass(frozen=True)
class DemoModel:
    """config_class and model_class of transformers, and the config's arguments. what: for the reader."""

    what: str
    config_class: str
    model_class: str
    arguments: dict[str, Any]


#: Heads of the recurrences are as large as in released models, so that the sizes of states and rings compare as they do there.
MODELS = {
    "nemotron_h": DemoModel(
        "Mamba-2, MLP, MoE and attention layers, as in Nemotron-H and Nemotron 3",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        COMMON
        | dict(
            hybrid_override_pattern="M-MEM*-ME",
            mamba_num_heads=4,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=2,
            conv_kernel=4,
            chunk_size=8,
            use_conv_bias=True,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            layer_norm_epsilon=1e-5,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            max_position_embeddings=512,
        ),
    ),
    "qwen3_next": DemoModel(
        "Gated DeltaNet, gated attention and MoE layers, as in Qwen3-Next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        COMMON
        | MOE
        | dict(
            num_hidden_layers=4,
            full_attention_interval=4,
            rms_norm_eps=1e-6,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=96,
            mlp_only_layers=[1],
            shared_expert_intermediate_size=48,
            num_experts_per_tok=3,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        ),
    ),
    "kimi_linear": DemoModel(
        "Kimi Delta Attention, latent attention and MoE layers, as in Kimi-Linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        COMMON
        | MOE
        | dict(
            num_hidden_layers=4,
            rms_norm_eps=1e-5,
            linear_attn_config=dict(
                kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=128, short_conv_kernel_size=4
            ),
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            intermediate_size=96,
            num_experts_per_token=3,
            num_shared_experts=1,
            num_expert_group=1,
            topk_group=1,
            moe_renormalize=True,
            routed_scaling_factor=2.446,
            first_k_dense_replace=1,
        ),
    ),
}
