"""Sources of the layers that several families share: how their tensors are named and packed."""

from __future__ import annotations

from torch import Tensor

from trtllm_replayssm.builders.families.base import Source, conv_taps, experts, rows
from trtllm_replayssm.builders.families.blueprint import Branch, MtpBlueprint, Sources
from trtllm_replayssm.builders.hf.config import HfConfig
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.layers.moe import Moe


def listed_types(config: HfConfig, key: str, words: tuple[str, ...]) -> list[str]:
    """A list with one of ``words`` for each layer. Raises CheckpointError when it is anything else."""
    kinds, count = config.get(key), config.positive("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in words for kind in kinds):
        raise config.fail(key, f"is missing, or not a list of {count} times {' or '.join(words)}")
    return kinds


def plain(prefix: str, names: dict[str, str]) -> Sources:
    """Parameters that are one tensor as it is: ``names`` maps ours to theirs behind ``prefix``."""
    return {ours: Source((prefix + theirs,)) for ours, theirs in names.items()}


def mamba2_sources(prefix: str, layer: Mamba2) -> Sources:
    """Mamba-2, whose in_proj has our rows z, x, B, C, dt in every family."""
    norm = () if layer.norm_epsilon is None else ("norm.weight",)
    names = ("in_proj.weight", "A_log", "dt_bias", "D", *norm, "out_proj.weight")
    biases = ("in_proj.bias", "out_proj.bias") if layer.proj_bias else ()
    conv_bias = ("conv1d.bias",) if layer.conv_bias else ()
    sources = plain(prefix, {name: name for name in (*names, *biases, *conv_bias)})
    return sources | {"conv1d.weight": conv_taps(f"{prefix}conv1d.weight")}


def gqa_sources(prefix: str, normed: bool = False) -> Sources:
    """Attention with a tensor for each of its four matrices, and for the norms of q and k where there are any."""
    norms = {f"{part}_norm.weight": f"{part}_norm.weight" for part in "qk"} if normed else {}
    qkv = rows(*(f"{prefix}{part}_proj.weight" for part in "qkv"))
    return {"qkv.weight": qkv} | plain(prefix, {"dense.weight": "o_proj.weight"} | norms)


def swiglu_sources(prefix: str) -> Sources:
    return {
        "up.weight": rows(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"),
        "down.weight": Source((f"{prefix}down_proj.weight",)),
    }


def expert_sources(prefix: str, count: int, up: tuple[str, ...], down: str) -> Sources:
    """Experts stored one by one: ``{prefix}{e}.{name}.weight``, fused here. up: names whose rows form ours."""
    return {
        "experts.up.weight": experts(*(tuple(f"{prefix}{e}.{name}.weight" for name in up) for e in range(count))),
        "experts.down.weight": experts(*((f"{prefix}{e}.{down}.weight",) for e in range(count))),
    }


def numbered_mtp(prefix: str, final_norm: str, branches: tuple[Branch, ...]) -> MtpBlueprint:
    """A prediction head that is spelled as one more layer. final_norm: its tensor behind ``prefix``, that of the layer."""
    return MtpBlueprint(
        norm_embedding=f"{prefix}enorm.weight",
        norm_hidden=f"{prefix}hnorm.weight",
        proj=f"{prefix}eh_proj.weight",
        final_norm=prefix + final_norm,
        branches=branches,
    )


def with_prefix(prefix: str, sources: Sources) -> Sources:
    """The same sources for parameters of a part of a layer, such as ``shared.``."""
    return {prefix + name: source for name, source in sources.items()}


def sigmoid_moe_sources(prefix: str, layer: Moe, bias: str, experts_of: tuple[str, str, str]) -> Sources:
    """Kimi-Linear and Ling. bias: the correction bias. experts_of: names of an expert's gate, up and down matrices."""
    gate, up, down = experts_of
    sources = plain(prefix, {"router.weight": "gate.weight", "router.bias": f"gate.{bias}"})
    sources |= expert_sources(f"{prefix}experts.", layer.num_experts, (gate, up), down)
    return sources | (with_prefix("shared.", swiglu_sources(f"{prefix}shared_experts.")) if layer.shared else {})


def kda_sources(prefix: str, layer: Kda, out: str) -> Sources:
    """Kimi Delta Attention. out: tensor of the output projection behind ``prefix``."""
    gates = [gate if layer.rank(gate) is None else f"{gate}_{part}" for gate in "fg" for part in "ab"]
    sources = plain(prefix, {f"{gate}.weight": f"{gate}_proj.weight" for gate in gates})
    sources |= plain(prefix, {"b.weight": "b_proj.weight", "dt_bias": "dt_bias", "norm.weight": "o_norm.weight"})
    return sources | {
        "qkv.weight": rows(*(f"{prefix}{x}_proj.weight" for x in "qkv")),
        "conv1d.weight": conv_taps(*(f"{prefix}{x}_conv1d.weight" for x in "qkv")),
        # Stored [H] or [1, 1, H, 1].
        "A_log": Source((f"{prefix}A_log",), lambda a_log: a_log.flatten()),
        "out_proj.weight": Source((prefix + out,)),
    }


def mla_sources(prefix: str, layer: Mla, out: str) -> Sources:
    """Multi-head latent attention, whose kv_b has per head the rows of k, then those of v."""
    heads, nope = layer.num_heads, layer.nope_dim

    def per_head(kv_b: Tensor) -> Tensor:
        return kv_b.unflatten(0, (heads, nope + layer.value_dim))

    kv_b = (f"{prefix}kv_b_proj.weight",)
    names = {
        "kv_a.weight": "kv_a_proj_with_mqa.weight",
        "kv_a_norm.weight": "kv_a_layernorm.weight",
        "dense.weight": out,
    }
    if layer.q_rank is None:
        names["q.weight"] = "q_proj.weight"
    else:
        names |= {"q_a.weight": "q_a_proj.weight", "q_a_norm.weight": "q_a_layernorm.weight"}
        names["q_b.weight"] = "q_b_proj.weight"
    if layer.gate is not None:
        names["gate.weight"] = "g_proj.weight"
    return plain(prefix, names) | {
        "k_up.weight": Source(kv_b, lambda w: per_head(w)[:, :nope].transpose(1, 2)),
        "v_up.weight": Source(kv_b, lambda w: per_head(w)[:, nope:]),
    }
