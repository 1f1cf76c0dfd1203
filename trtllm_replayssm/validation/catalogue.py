"""A tiny model of every family, as arguments of transformers; without transformers they are read as a config.json."""

from __future__ import annotations

from trtllm_replayssm.builders.families.base import Family
from trtllm_replayssm.builders.families.registry import FAMILIES, recognise
from trtllm_replayssm.demo import catalogue as demo
from trtllm_replayssm.demo.catalogue import COMMON, MOE, VOCAB_SIZE, DemoModel

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}

#: Mamba-2 beside attention, as several families spell it; of the size that is released.
PREFIXED_MAMBA2 = COMMON | dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_n_heads=2,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=8,
    mamba_n_groups=1,
    mamba_conv_bias=True,
    rms_norm_eps=1e-5,
)
GATED_DELTA = COMMON | dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
)
KIMI_LINEAR = demo.MODELS["kimi_linear"].arguments
QWEN_MOE = dict(moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=3)

#: Heads of the recurrences are as large as in released models: other kernels are compiled for other sizes.
MODELS = demo.MODELS | {
    "mamba2": DemoModel(
        "Mamba-2 layers alone, as in Codestral Mamba",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        COMMON
        | dict(
            num_hidden_layers=3,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            num_heads=2,
            head_dim=64,
            state_size=128,
            n_groups=1,
            expand=2,
            conv_kernel=4,
            chunk_size=8,
            use_conv_bias=True,
            residual_in_fp32=True,
        ),
    ),
    "qwen3_5": DemoModel(
        "Gated DeltaNet, gated attention and dense MLPs, as in Qwen3.5",
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        GATED_DELTA
        | dict(
            num_hidden_layers=4,
            full_attention_interval=4,
            head_dim=32,
            intermediate_size=96,
            rope_parameters=ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        ),
    ),
    "bailing_hybrid": DemoModel(
        "Kimi Delta Attention with a bounded gate, latent attention and grouped experts, as in Ling 3.0",
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        COMMON
        | MOE
        | dict(
            num_hidden_layers=4,
            layer_group_size=2,
            rms_norm_eps=1e-6,
            kda_safe_gate=True,
            kda_lower_bound=-5.0,
            short_conv_kernel_size=4,
            norm_topk_prob=True,
            rope_theta=6e6,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=96,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            num_shared_experts=1,
            first_k_dense_replace=1,
            num_experts_per_token=2,
            num_expert_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            max_position_embeddings=512,
        ),
    ),
    "state_spaces": DemoModel(
        "Mamba-2 layers alone, as the training package of state-spaces spells them",
        "MambaConfig of mamba_ssm",
        "MambaLMHeadModel",
        dict(
            d_model=64,
            n_layer=3,
            vocab_size=VOCAB_SIZE,
            eos_token_id=2,
            pad_vocab_size_multiple=16,
            ssm_cfg=dict(layer="Mamba2"),
            rms_norm=True,
            residual_in_fp32=True,
            tie_embeddings=True,
        ),
    ),
    "granite": DemoModel(
        "Mamba-2, attention and MoE layers with multipliers, as in Granite 4",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        PREFIXED_MAMBA2
        | dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            embedding_multiplier=0.7,
            logits_scaling=1.3,
            residual_multiplier=0.8,
            attention_multiplier=0.0625,
            shared_intermediate_size=48,
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
        ),
    ),
    "falcon_h1": DemoModel(
        "Mamba-2 and attention side by side, as in Falcon-H1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        PREFIXED_MAMBA2
        | dict(
            num_hidden_layers=2,
            intermediate_size=96,
            rope_parameters=dict(rope_type="default", rope_theta=1e5),
            mamba_d_ssm=128,
            mamba_rms_norm=False,
            mamba_norm_before_gate=False,
            lm_head_multiplier=0.9,
            embedding_multiplier=0.6,
            mlp_multipliers=[0.8, 0.6],
            key_multiplier=0.5,
            attention_in_multiplier=0.9,
            attention_out_multiplier=0.7,
            ssm_multipliers=[1.35, 0.8, 1.2, 0.7, 1.4],
            ssm_in_multiplier=1.25,
            ssm_out_multiplier=1.3,
        ),
    ),
    "bamba": DemoModel(
        "Mamba-2, attention and MLP layers, as in Bamba",
        "BambaConfig",
        "BambaForCausalLM",
        PREFIXED_MAMBA2
        | dict(
            num_hidden_layers=3,
            intermediate_size=96,
            attn_layer_indices=[1],
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        ),
    ),
    "olmo_hybrid": DemoModel(
        "Gated DeltaNet and attention with norms behind branches, as in OLMo-Hybrid",
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        GATED_DELTA
        | dict(
            num_hidden_layers=4,
            num_key_value_heads=4,
            linear_num_key_heads=4,
            linear_allow_neg_eigval=True,
            layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            intermediate_size=96,
            rope_parameters=dict(rope_type="default", rope_theta=None),
        ),
    ),
    "lara_mini": DemoModel(
        "Gated DeltaNet, attention over windows and MoE layers, as in Lara-4-Mini",
        "LaraMiniConfig",
        "LaraMiniForCausalLM",
        GATED_DELTA
        | QWEN_MOE
        | dict(
            num_hidden_layers=5,
            layer_types=[f"{kind}_attention" for kind in ("linear", "sliding", "linear", "full", "sliding")],
            norm_topk_prob=True,
            head_dim=16,
            sliding_window=8,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "qwen4_exp": DemoModel(
        "Gated DeltaNet, attention to chosen blocks, streams and n-grams, as in Qwen3.8-Flash-Next",
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        GATED_DELTA
        | QWEN_MOE
        | dict(
            num_hidden_layers=4,
            full_attention_interval=4,
            head_dim=32,
            rope_parameters=ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            hc_count=2,
            hc_lowrank=8,
            ple_layer_ids=[1],
            ple_embed_dim=32,
            ple_conv_kernel_size=4,
            seed=1234,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=97,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=2,
            indexer_n_heads=12,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=16,
            indexer_compress_ratio=4,
            output_gate_type="sigmoid",
        ),
    ),
    "glm5_next": DemoModel(
        "Kimi Delta Attention, latent attention to chosen blocks, streams and clamped experts, as in GLM-5.3-Flash",
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        dict(
            text_config=COMMON
            | dict(
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                intermediate_size=96,
                moe_intermediate_size=32,
                q_lora_rank=24,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=0,
                v_head_dim=16,
                rms_norm_eps=1e-5,
                layer_types=["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
                linear_conv_kernel_dim=4,
                linear_lower_bound=-5.0,
                hc_eps=1e-6,
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                n_routed_experts=8,
                n_shared_experts=1,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                swiglu_limit=0.7,
                linear_head_dim=128,
                linear_num_heads=2,
                hc_mult=2,
                hc_sinkhorn_iters=5,
                index_topk=16,
                index_head_dim=16,
                index_n_heads=12,
                index_kpool=4,
                max_position_embeddings=512,
            ),
            vision_config=dict(
                depth=1,
                hidden_size=32,
                num_heads=2,
                image_size=16,
                patch_size=4,
                out_hidden_size=64,
                intermediate_size=48,
                projection_intermediate_size=64,
            ),
            image_token_id=262,
            video_token_id=263,
            image_start_token_id=264,
            image_end_token_id=265,
            video_start_token_id=266,
            video_end_token_id=267,
        ),
    ),
    "kimi_k3": DemoModel(
        "Kimi Delta Attention, gated latent attention, attention residuals and latent experts, as in Kimi-K3",
        "KimiK3Config of its repository",
        "KimiK3ForConditionalGeneration",
        dict(
            text_config=KIMI_LINEAR
            | dict(
                model_type="kimi_linear",
                hidden_act="situ",
                activation_situ_beta=1.5,
                activation_situ_linear_beta=2.0,
                attn_res_block_size=2,
                linear_attn_config=KIMI_LINEAR["linear_attn_config"]
                | dict(gate_lower_bound=-5.0, use_full_rank_gate=True),
                q_lora_rank=24,
                mla_use_output_gate=True,
                routed_expert_hidden_size=32,
                latent_moe_use_norm=True,
            )
        ),
    ),
}


def family_of(name: str) -> type[Family]:
    """The class that reads ``MODELS[name]``."""
    return recognise({"architectures": [MODELS[name].model_class], **MODELS[name].arguments})


def families_without_model() -> list[str]:
    """Families that ``convert`` knows and that no tiny model stands for, by their first architecture."""
    covered = {family_of(name) for name in MODELS}
    return [family.architectures[0] for family in FAMILIES if family not in covered]
