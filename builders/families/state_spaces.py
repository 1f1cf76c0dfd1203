"""Mamba-2 models as the state-spaces package writes them: sizes that its config does not state are that package's defaults."""

from __future__ import annotations

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch
from trtllm_replayssm.builders.families.mamba2 import time_step_limit
from trtllm_replayssm.builders.families.parts import mamba2_sources
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.mamba2 import Mamba2

#: Of every norm; the config has no key for it.
EPSILON = 1e-5
#: Keys that choose an implementation.
IMPLEMENTATION_KEYS = ("fused_add_norm", "attn_cfg")
#: Keys of ``ssm_cfg`` that set initial values, or choose an implementation.
SSM_KEYS = (
    *("A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "use_mem_eff_path", "device", "dtype"),
    *("process_group", "sequence_parallel", "layer_idx"),
)


class StateSpaces(BlueprintFamily):
    """Tensors ``backbone.layers.N.{norm, mixer.*}``, as Mamba2 has them."""

    architectures = ("MambaLMHeadModel",)
    aliases = {"d_model": "hidden_size", "n_layer": "num_hidden_layers", "tie_embeddings": "tie_word_embeddings"}

    def read(self) -> Blueprint:
        config = self.config
        config.expect("rms_norm", True)
        config.expect("d_intermediate", 0)
        config.expect("attn_layer_idx", [])
        config.ignore(*IMPLEMENTATION_KEYS)
        layer = self.mamba(config.section("ssm_cfg"))
        branches = []
        for i in range(config.positive("num_hidden_layers")):
            prefix = f"backbone.layers.{i}."
            branches.append(Branch(f"{prefix}norm.weight", layer, mamba2_sources(f"{prefix}mixer.", layer)))
        embedding = "backbone.embedding.weight"
        vocabulary, multiple = self.vocabulary(embedding), config.positive("pad_vocab_size_multiple", 1)
        return Blueprint(
            vocab_size=-(-vocabulary // multiple) * multiple,
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=EPSILON,
            branches=tuple(branches),
            embedding=embedding,
            final_norm="backbone.norm_f.weight",
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            residual_float32=config.flag("residual_in_fp32"),
        )

    def mamba(self, ssm: HfConfig) -> Mamba2:
        """The layer of ``ssm_cfg``, with the defaults of the package's Mamba2 class."""
        ssm.expect("layer", "Mamba2")
        ssm.expect("activation", "silu", "swish")
        ssm.expect("rmsnorm", True)
        for key in ("norm_before_gate", "D_has_hdim"):
            ssm.expect(key, False)
        ssm.ignore(*SSM_KEYS)
        inner = ssm.positive("expand", 2) * self.config.positive("hidden_size")
        head_dim = ssm.positive("headdim", 64)
        ssm.expect("d_ssm", inner)
        if inner % head_dim:
            raise ssm.fail("headdim", f"is {head_dim}, which does not divide the {inner} channels")
        limit = {"time_step_limit": ssm.get("dt_limit", [0.0, float("inf")])}
        low, high = time_step_limit(HfConfig(limit, ssm.where))
        layer = Mamba2(
            num_heads=inner // head_dim,
            head_dim=head_dim,
            state_size=ssm.positive("d_state", 128),
            n_groups=ssm.positive("ngroups", 1),
            conv_kernel=ssm.positive("d_conv", 4),
            norm_epsilon=EPSILON,
            conv_bias=ssm.flag("conv_bias", True),
            proj_bias=ssm.flag("bias", False),
            dt_min=low,
            dt_max=high,
        )
        ssm.finish()
        return layer
