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
    REWRITES[text["model_type"]](text, tensors)
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


REWRITES = {
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "kimi_linear": kimi_linear,
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
    elif config.model_type == "nemotron_h" and config.num_nextn_predict_layers:
        kinds = list(config.layers_block_type)
        copy(f"backbone.layers.{kinds.index('full_attention')}.", "mtp.layers.0.")
        copy(f"backbone.layers.{kinds.index('moe')}.", "mtp.layers.1.")
        norms("mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.1.final_layernorm.weight")
        shapes["mtp.layers.0.eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    elif config.model_type == "bailing_hybrid":
        layer = f"model.layers.{config.num_hidden_layers}."
        copy(f"model.layers.{config.num_hidden_layers - 1}.", layer)
        norms(f"{layer}enorm.weight", f"{layer}hnorm.weight", f"{layer}final_layernorm.weight")
        shapes[f"{layer}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(99)
    return {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
