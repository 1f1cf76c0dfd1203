"""Folders of tiny models in the two spellings that exist: as ``save_pretrained`` writes them, and as the hub holds them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
#: Keys that transformers 5 adds when it saves, and published files do not have.
ADDED_BY_SAVE = (
    *("layer_types", "mlp_layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "qk_head_dim"),
)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config (text level) and tensors of a folder, whatever its shards."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return config, tensors


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int) -> Path:
    """A folder with one file, or with ``shards`` files and an index."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file({n: tensors[n].contiguous() for n in names}, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({n: tensors[n].contiguous() for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_saved(model: Any, folder: Path, shards: int = 1) -> Path:
    """As save_pretrained writes it."""
    model.save_pretrained(folder)
    return write_folder(folder, *read_folder(folder), shards) if shards > 1 else folder


def write_hub(model: Any, folder: Path, shards: int = 2, mtp: bool = True) -> Path:
    """As the published checkpoint is spelled, with MTP tensors where the family publishes them."""
    model.save_pretrained(folder)
    config, tensors = read_folder(folder)
    extra = mtp_tensors(model.config.get_text_config(), tensors) if mtp else {}
    text = config.get("text_config", config)
    REWRITES[getattr(model, "hub_spelling", text["model_type"])](text, tensors)
    return write_folder(folder, config, tensors | extra, shards)


# ---- spellings of the hub --------------------------------------------------------------------------------------------


def mamba2(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    # Published files hold the bare word Infinity, which is what json.dumps writes.
    limit = config["time_step_limit"]
    config["time_step_limit"] = [float(end["__float__"]) if isinstance(end, dict) else end for end in limit]


def nemotron_h(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    mamba2(config, tensors)
    kinds = config.pop("layers_block_type")
    config |= {"hybrid_override_pattern": "".join(SYMBOLS[k] for k in kinds), "num_hidden_layers": len(kinds)}
    config |= {"rms_norm_eps": config["layer_norm_epsilon"], "rope_theta": 10000, "partial_rotary_factor": 1.0}
    mtp = config.pop("mtp_layers_block_type", None)
    if config.get("num_nextn_predict_layers"):
        config["mtp_hybrid_override_pattern"] = "".join(SYMBOLS[k] for k in mtp)


def qwen3_next(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["full_attention_interval"] = config.pop("layer_types").index("full_attention") + 1
    rope = config.pop("rope_parameters")
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")} | {"rope_scaling": None}


def qwen3_5(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config |= {"full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    config |= {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}


def qwen3_5_moe(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The BF16 checkpoints fuse the experts of a layer."""
    qwen3_5(config, tensors)
    groups: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in list(tensors):
        match = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match:
            groups.setdefault(match[1], {})[int(match[2]), match[3]] = tensors.pop(name)
    for prefix, parts in groups.items():
        count = len(parts) // 3
        gate_up = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])


def kimi_linear(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        layer = re.match(r"model\.layers\.(\d+)\.block_sparse_moe\.", name)
        if layer and int(layer[1]) < config["first_k_dense_replace"]:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)
    for key in ADDED_BY_SAVE:
        config.pop(key, None)
    config |= {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid", "head_dim": 72}
    config |= {"use_grouped_topk": True, "num_nextn_predict_layers": 0, "rope_theta": 10000.0, "rope_scaling": None}


def glm5_next(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Layers are counted from 0, and KDA has a section of its own."""
    indexed = [kind != "linear_attention" for kind in config["layer_types"]]
    config["linear_attn_config"] = {
        "kda_layers": [i for i, here in enumerate(indexed) if not here],
        "full_attn_layers": [i for i, here in enumerate(indexed) if here],
        "num_heads": config["linear_num_heads"],
        "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "gate_lower_bound": config.pop("linear_lower_bound"),
    }
    for key in ADDED_BY_SAVE:
        if key not in ("layer_types", "mlp_layer_types"):
            config.pop(key, None)
    config["layer_types"] = ["deepseek_sparse_attention" if here else "linear_attention" for here in indexed]
    config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True}
    config |= {"mhc": True, "mla_use_nope": True, "index_kpool_compress": True, "indexer_rope_interleave": True}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32"}


def qwen4_exp(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The hash's constants are not in the published files, whose experts are fused."""
    qwen3_5_moe(config, tensors)
    config["output_gate_type"] = "sigmoid" if config["hc_count"] == 2 else "silu"
    config["layer_types"] = [kind.replace("indexed", "full") for kind in config["layer_types"]]
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"]
    for name in [name for name in tensors if name.endswith(("layer_multipliers", "_vocab_sizes", "_offsets"))]:
        del tensors[name]


def bailing_hybrid(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["head_dim"] = config["linear_head_dim"]
    for i, kind in enumerate(config["layer_types"]):
        if kind == "linear_attention":
            dense = f"model.layers.{i}.attention.dense.weight"
            tensors[dense.replace(".dense.", ".o_proj.")] = tensors.pop(dense)
    for key in ADDED_BY_SAVE:
        config.pop(key, None)
    for saved, published in {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
    }.items():
        config[published] = config.pop(saved)
    config |= {"architectures": ["BailingMoeV3ForCausalLM"], "no_kda_lora": True, "rope_interleave": True}
    config |= {"gated_attention_proj_granularity_type": "head_wise", "score_function": "sigmoid"}
    config |= {"moe_shared_expert_intermediate_size": config["moe_intermediate_size"], "up_proj_norm": False}
    # Stated in the published file, and not to be applied to the rope channels.
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"] = 0.5


def kimi_k3(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """There is only the published spelling."""


def state_spaces(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A config of another package, which leaves out what it has defaults for, and a copy of the tied head."""
    ssm = {"layer": "Mamba2", "d_state": config["state_size"], "headdim": config["head_dim"]}
    sizes = {"d_model": config["hidden_size"], "n_layer": config["num_hidden_layers"], "d_intermediate": 0}
    # The embedding has more rows than that.
    sizes["vocab_size"] = config["vocab_size"] - 3
    config.clear()
    config |= sizes | {"ssm_cfg": ssm, "attn_layer_idx": [], "attn_cfg": {}, "pad_vocab_size_multiple": 16}
    config |= dict.fromkeys(("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings"), True)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"].clone()


def granite(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [words[kind] for kind in config["layer_types"]]
    config["position_embedding_type"] = config["position_embedding_type"] or "nope"
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    config |= {"init_method": "mup", "normalization_function": "rmsnorm"}
    config.pop("time_step_limit")


def falcon_h1(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    config |= {"head_dim": 16, "attn_layer_indices": None, "mamba_use_mlp": True}
    config.pop("time_step_limit")


def bamba(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5, "attn_rotary_emb": 8}
    config.pop("time_step_limit")


def olmo_hybrid(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """transformers writes the fused convolution in three equal parts, and two norms under one name."""
    keys, values = (config[f"linear_num_{part}_heads"] * config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    for i, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{i}."
        if kind == "linear_attention":
            names = [f"{layer}linear_attn.{part}_conv1d.weight" for part in "qkv"]
            tensors |= zip(names, torch.cat([tensors[name] for name in names]).split([keys, keys, values]))
        else:
            norm = tensors.pop(f"{layer}feedforward_layer_norm.weight")
            tensors[f"{layer}post_attention_layernorm.weight"] = norm
    if config["rope_parameters"]["rope_theta"] is None:
        config["rope_parameters"] = None


def lara_mini(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As transformers writes it."""


REWRITES = {
    "mamba2": mamba2,
    "state_spaces": state_spaces,
    "granitemoehybrid": granite,
    "falcon_h1": falcon_h1,
    "bamba": bamba,
    "olmo_hybrid": olmo_hybrid,
    "lara_mini": lara_mini,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "kimi_linear": kimi_linear,
    "kimi_k3": kimi_k3,
    "qwen4_exp_text": qwen4_exp,
    "glm5_next_text": glm5_next,
    "bailing_hybrid": bailing_hybrid,
}


# ---- multi-token prediction ------------------------------------------------------------------------------------------


def mtp_tensors(config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random MTP tensors under their published names; transformers neither loads nor writes them.

    Their layers are shaped as layers of the same kind in the body.
    """
    hidden, shapes = config.hidden_size, {}

    def copy(source: str, target: str) -> None:
        shapes.update({target + n[len(source) :]: t.shape for n, t in tensors.items() if n.startswith(source)})

    def norms(*names: str) -> None:
        shapes.update({name: torch.Size([hidden]) for name in names})

    if config.model_type.startswith("qwen3"):
        root = "model.language_model." if "model.language_model.norm.weight" in tensors else "model."
        copy(f"{root}layers.{config.num_hidden_layers - 1}.", "mtp.layers.0.")
        norms("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
        shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    elif config.model_type.startswith("qwen4"):
        root = "model.language_model." if "model.language_model.embed_tokens.weight" in tensors else "model."
        copy(f"{root}layers.{config.num_hidden_layers - 1}.", "mtp.layers.0.")
        copy(f"{root}hyper_connection_mixer.", "mtp.hyper_connection_mixer.")
        shapes |= dict.fromkeys(("mtp.fc_embedding.weight", "mtp.fc_hidden.weight"), torch.Size([hidden, hidden]))
    elif config.model_type == "nemotron_h" and config.num_nextn_predict_layers:
        kinds = list(config.layers_block_type)
        copy(f"backbone.layers.{kinds.index('full_attention')}.", "mtp.layers.0.")
        copy(f"backbone.layers.{kinds.index('moe')}.", "mtp.layers.1.")
        norms("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.1.final_layernorm.weight")
        shapes["mtp.layers.0.eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    elif config.model_type in ("bailing_hybrid", "glm5_next_text"):
        root, final = ("model.", "final_layernorm")
        if config.model_type == "glm5_next_text":
            root, final = ("model.language_model.", "shared_head.norm")
        layer = f"{root}layers.{config.num_hidden_layers}."
        copy(f"{root}layers.{config.num_hidden_layers - 1}.", layer)
        # The head of GLM-5.3 has one residual stream.
        shapes = {name: shape for name, shape in shapes.items() if ".hc_" not in name}
        norms(f"{layer}enorm.weight", f"{layer}hnorm.weight", f"{layer}{final}.weight")
        shapes[f"{layer}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(99)
    return {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
