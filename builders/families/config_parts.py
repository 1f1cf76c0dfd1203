"""Layers and factors that several families read from config keys of the same names."""

from __future__ import annotations

import math

from trtllm_replayssm.builders.families.mamba2 import time_step_limit
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.network.base import Rope

#: Where RoPE is described; for models, or layers, without it.
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
#: Sizes of Mamba-2 in the families that share their names; a model without such layers may still state them.
MAMBA_KEYS = (
    *("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_conv_bias"),
    *("mamba_proj_bias", "mamba_expand", "mamba_chunk_size", "time_step_limit"),
)


def multipliers(config: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of so many factors. Raises CheckpointError when it is anything else."""
    values = config.get(key)
    numbers = values if isinstance(values, list) else []
    if len(numbers) != count or not all(type(v) in (int, float) and 0 < v < math.inf for v in numbers):
        raise config.fail(key, f"is {values!r}; expected {count} positive numbers")
    return tuple(float(v) for v in numbers)


def gate_bound(config: HfConfig, key: str) -> float:
    """Lower bound of a decay. Raises CheckpointError unless it is negative."""
    bound = config.number(key)
    if not bound < 0:
        raise config.fail(key, f"is {bound:g}; a bounded gate needs a negative one")
    return bound


def head_dim(config: HfConfig) -> int:
    """Channels of an attention head: a key of its own, or what the hidden size leaves for each head."""
    heads = config.positive("num_attention_heads")
    return config.positive("head_dim", max(config.positive("hidden_size") // heads, 1))


def optional_rope(config: HfConfig, channels: int, share: float = 1.0) -> Rope | None:
    """RoPE over ``share`` of a head's channels, from ``rope_parameters`` or from keys beside it; None without a theta.

    Raises UnsupportedModelError for scaled RoPE or another share, CheckpointError when two thetas contradict each other.
    """
    config.expect("rope_scaling", None)
    levels = [config, *([config.section("rope_parameters")] if "rope_parameters" in config else [])]
    for level in levels:
        level.expect("rope_type", "default")
        level.expect("partial_rotary_factor", share)
    stated = {level.positive_number("rope_theta") for level in levels if "rope_theta" in level}
    for nested in levels[1:]:
        nested.finish()
    if len(stated) > 1:
        raise config.fail("rope_theta", f"is {config.number('rope_theta'):g}, but another one in rope_parameters")
    turned = int(channels * share)
    if turned % 2:
        raise config.fail("head_dim", f"is {channels}, of which {turned} would turn; expected an even number")
    return Rope(turned, stated.pop()) if stated else None


def required_rope(config: HfConfig, channels: int, share: float = 1.0) -> Rope:
    """``optional_rope`` of a model that cannot do without. Raises CheckpointError when theta is missing."""
    rope = optional_rope(config, channels, share)
    if rope is None:
        raise config.fail("rope_theta", "is missing, and no value can be assumed for it")
    return rope


def prefixed_mamba2(config: HfConfig, epsilon: float | None, inner: int, scales: tuple[float, ...] = ()) -> Mamba2:
    """Mamba-2 from the keys ``mamba_*``. epsilon, scales: see Mamba2. inner: channels of x, for a ``mamba_d_head`` of auto."""
    config.expect("mamba_proj_bias", False)
    config.ignore("mamba_expand", "mamba_chunk_size")
    heads = config.positive("mamba_n_heads")
    if config.get("mamba_d_head") == "auto" and inner % heads:
        raise config.fail("mamba_n_heads", f"is {heads}, which does not divide the {inner} channels of all heads")
    low, high = time_step_limit(config)
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads if config.get("mamba_d_head") == "auto" else config.positive("mamba_d_head"),
        state_size=config.positive("mamba_d_state"),
        n_groups=config.positive("mamba_n_groups"),
        conv_kernel=config.positive("mamba_d_conv"),
        norm_epsilon=epsilon,
        conv_bias=config.flag("mamba_conv_bias"),
        dt_min=low,
        dt_max=high,
        scales=scales if any(factor != 1 for factor in scales) else (),
    )


def prefixed_gated_delta(config: HfConfig, epsilon: float, beta_scale: float = 1.0) -> GatedDelta:
    """Gated DeltaNet from the keys ``linear_*``. epsilon: of its output norm."""
    return GatedDelta(
        num_key_heads=config.positive("linear_num_key_heads"),
        num_value_heads=config.positive("linear_num_value_heads"),
        key_dim=config.positive("linear_key_head_dim"),
        value_dim=config.positive("linear_value_head_dim"),
        conv_kernel=config.positive("linear_conv_kernel_dim"),
        norm_epsilon=epsilon,
        beta_scale=beta_scale,
    )


def softmax_moe(config: HfConfig, normalise: bool, shared_gate: bool) -> Moe:
    """Experts beside a shared one. normalise, shared_gate: see Moe."""
    return Moe(
        num_experts=config.positive("num_experts"),
        top_k=config.positive("num_experts_per_tok"),
        intermediate_size=config.positive("moe_intermediate_size"),
        activation="swiglu",
        router="softmax",
        normalise=normalise,
        shared=Mlp(config.positive("shared_expert_intermediate_size"), "swiglu"),
        shared_gate=shared_gate,
    )


def expanded(config: HfConfig) -> int:
    """Channels of x by ``mamba_expand``."""
    return config.positive("mamba_expand", 2) * config.positive("hidden_size")
