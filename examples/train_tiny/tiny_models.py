"""The three models: byte-level hybrids of about three million parameters, one for each recurrence.

Heads and states are as large as in released models, so that rounding meets states of a real size. All are dense.
"""

from __future__ import annotations

from trtllm_replayssm.demo.catalogue import VOCAB_SIZE, DemoModel

COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=16384,
    tie_word_embeddings=False,
)

MODELS = {
    "mamba2": DemoModel(
        "Mamba-2, squared-ReLU MLP and attention layers, as in Nemotron-H",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        COMMON
        | dict(
            hybrid_override_pattern="M-M-M-*-M-",
            mamba_num_heads=4,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=2,
            conv_kernel=4,
            use_conv_bias=True,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=768,
            layer_norm_epsilon=1e-5,
        ),
    ),
    "gated_delta": DemoModel(
        "Gated DeltaNet, gated attention and SwiGLU layers, as in dense Qwen3.5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        COMMON
        | dict(
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            rms_norm_eps=1e-6,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=640,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        ),
    ),
    "kda": DemoModel(
        "Kimi Delta Attention, latent attention and SwiGLU layers, as in Kimi-Linear",
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        COMMON
        | dict(
            num_hidden_layers=4,
            linear_attn_config=dict(
                kda_layers=[1, 2, 3], full_attn_layers=[4], num_heads=2, head_dim=128, short_conv_kernel_size=4
            ),
            rms_norm_eps=1e-5,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=64,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=64,
            intermediate_size=640,
            first_k_dense_replace=4,
            # Read by sparse layers, of which there are none.
            num_experts=2,
            num_experts_per_token=1,
            num_shared_experts=1,
            num_expert_group=1,
            topk_group=1,
            moe_intermediate_size=32,
        ),
    ),
}
