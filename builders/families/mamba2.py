"""Mamba2 and Codestral-Mamba: Mamba-2 layers alone."""

from __future__ import annotations

from trtllm_replayssm.builders.families.blueprint import Blueprint, BlueprintFamily, Branch
from trtllm_replayssm.builders.families.parts import mamba2_sources
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.mamba2 import Mamba2

#: Keys that set initial values, or sizes that the head counts already give.
TRAINING_KEYS = (
    *("expand", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
    *("time_step_init_scheme", "time_step_scale"),
)


class Mamba2Family(BlueprintFamily):
    """Tensors ``backbone.layers.N.{norm, mixer.*}``, one Mamba-2 branch a layer."""

    architectures = ("Mamba2ForCausalLM",)

    def read(self) -> Blueprint:
        config = self.config
        config.expect("hidden_act", "silu")
        # Codestral's file says norm_before_gate: true, a default of an early config class that no implementation of
        # this architecture follows: the gate comes first.
        config.ignore("max_position_embeddings", "norm_before_gate", *TRAINING_KEYS)
        config.expect("rms_norm", True)
        config.expect("intermediate_size", config.positive("num_heads") * config.positive("head_dim"))
        epsilon, low_high = config.positive_number("layer_norm_epsilon"), time_step_limit(config)
        layer = Mamba2(
            num_heads=config.positive("num_heads"),
            head_dim=config.positive("head_dim"),
            state_size=config.positive("state_size"),
            n_groups=config.positive("n_groups"),
            conv_kernel=config.positive("conv_kernel"),
            norm_epsilon=epsilon,
            conv_bias=config.flag("use_conv_bias"),
            proj_bias=config.flag("use_bias"),
            dt_min=low_high[0],
            dt_max=low_high[1],
        )
        branches = []
        for i in range(config.positive("num_hidden_layers")):
            prefix = f"backbone.layers.{i}."
            branches.append(Branch(f"{prefix}norm.weight", layer, mamba2_sources(f"{prefix}mixer.", layer)))
        embedding = self.pick("backbone.embeddings.weight", "backbone.embedding.weight")
        return Blueprint(
            vocab_size=self.vocabulary(embedding),
            hidden_size=config.positive("hidden_size"),
            norm_epsilon=epsilon,
            branches=tuple(branches),
            embedding=embedding,
            final_norm="backbone.norm_f.weight",
            head="lm_head.weight",
            tie_embeddings=self.tied("lm_head.weight"),
            residual_float32=config.flag("residual_in_fp32"),
        )


def time_step_limit(config: HfConfig) -> tuple[float, float]:
    """Lower and upper limit of the time step; published files hold (0, inf).

    ``time_step_min`` and ``time_step_floor`` are initial values. transformers clamps with them in the scan of Nemotron-H,
    and not in its one-token step; the model was trained without.
    """
    limit = config.get("time_step_limit", [0.0, float("inf")])
    if not isinstance(limit, list) or len(limit) != 2 or not all(type(v) in (int, float) for v in limit):
        raise config.fail("time_step_limit", f"is {limit!r}; expected two numbers")
    low, high = (float(v) for v in limit)
    if not 0 <= low < high:
        raise config.fail("time_step_limit", f"is {limit!r}; expected 0 <= lower < upper")
    return low, high
