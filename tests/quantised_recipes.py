"""What published quantised checkpoints quantise and how they describe it, on tiny models: a recipe for each kind of file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quantisers as q
import torch
from hf_models import build
from hf_spelling import read_folder, write_folder, write_hub, write_saved
from quantisers import Quantiser, quantised
from torch import Tensor

#: From a checkpoint's weight names to the rules that hold for them: the first that matches somewhere in the name.
Rules = list[tuple[str, Quantiser | None]]
#: Weights that no recipe quantises.
NEVER = r"norm|conv1d|visual|[^y]\.gate\.weight|embed|router"
#: Rules that hold for embeddings all the same.
EMBEDDINGS = ("embeddings", "ngram_embedding")


@dataclass(frozen=True)
class Recipe:
    """model: one of hf_models. rules: by expressions. describe: from the quantised modules, with the name of each one's
    quantiser, to the folder's files of JSON; ``config.json`` is merged into the model's. counts: what the note says. extra:
    scales of a quantised KV cache. shared: scales that several weights have.
    """

    model: str
    rules: Rules
    describe: Callable[[dict[str, str]], dict[str, Any]]
    counts: str
    write: Callable[..., Path] = write_hub
    extra: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)


#: ``quant_algo`` of what a quantiser writes.
ALGORITHMS = {
    "nvfp4": "NVFP4",
    "nvfp4_weight_only": "W4A16_NVFP4",
    "nvfp4_awq": "NVFP4_AWQ",
    "nvfp4_svd": "NVFP4_SVD",
    "fp8": "FP8",
    "fp8_weight_only": "FP8",
    "fp8_pb_wo": "FP8_PB_WO",
    "fp8_blocks": "FP8_PB_WO",
    "ngram_shard": "FP8",
}


def mixed(modules: dict[str, str]) -> dict[str, Any]:
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": table(modules)}


def table(modules: dict[str, str]) -> dict[str, Any]:
    group = {"NVFP4": {"group_size": 16}, "W4A16_NVFP4": {"group_size": 16}}
    algorithms = {module: ALGORITHMS[quantiser] for module, quantiser in modules.items()}
    return {module: {"quant_algo": algorithm} | group.get(algorithm, {}) for module, algorithm in algorithms.items()}


def nemotron_super(modules: dict[str, str]) -> dict[str, Any]:
    """ModelOpt writes both files, the second one with groups that restate the table."""
    producer = {"name": "modelopt", "version": "0.41.0"}
    described = mixed(modules) | {
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "mtp*", "*mixer.conv1d*"],
    }
    groups = {"group_0": {"targets": sorted(modules), "weights": {"num_bits": 4, "type": "float"}}}
    inside = mixed(modules) | {"quant_method": "modelopt", "producer": producer, "config_groups": groups, "ignore": []}
    inside |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    return {
        "hf_quant_config.json": {"producer": producer, "quantization": described},
        "config.json": {"quantization_config": inside},
    }


def flash_next_nvidia(modules: dict[str, str]) -> dict[str, Any]:
    """NVIDIA's: blocks of experts and the table, in both files, with groups that restate it."""
    names = {re.sub(r"(\.experts|\.ngram_embedding)\..*", r"\1", module): made for module, made in modules.items()}
    groups = {
        "group_0": {"targets": ["mtp.layers.0.mlp.experts"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {"targets": ["x"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    }
    producer = {"name": "modelopt", "version": "0.46.0"}
    inside = mixed(names) | {"quant_method": "modelopt", "config_groups": groups, "ignore": ["lm_head"]}
    outside = mixed(names) | {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": None}
    return {
        "hf_quant_config.json": {"producer": producer, "quantization": outside},
        "config.json": {"quantization_config": inside | {"producer": producer}},
    }


def kimi_k3_nvidia(modules: dict[str, str]) -> dict[str, Any]:
    """ModelOpt's: every name under which some server looks it up, banks of experts, projections that servers fuse."""
    entries = {re.sub(r"\.experts\..*", ".experts", module): made for module, made in modules.items()}
    fused = {
        f"{module.rpartition('.')[0]}.in_proj_qkvgfab": made for module, made in modules.items() if "b_proj" in module
    }
    for name, made in list((entries | fused).items()):
        entries |= dict.fromkeys((name, name.removeprefix("language_model."), name.partition("model.model.")[2]), made)
    mlp = {name.replace("block_sparse_moe", "mlp"): made for name, made in entries.items()}
    excluded = ["*block_sparse_moe.gate*", "*block_sparse_moe.shared_experts*", "*self_attn.o_norm*", "*layernorm*"]
    described = mixed(mlp | entries) | {"group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": excluded}
    inside = mixed(mlp | entries) | {"quant_method": "modelopt_mixed", "ignore": excluded}
    return {
        "hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": described},
        "config.json": {"quantization_config": inside},
    }


def modelopt_file(**quantization: Any) -> dict[str, Any]:
    return {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}


def in_config(**description: Any) -> dict[str, Any]:
    return {"config.json": {"quantization_config": description}}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return in_config(quant_method="compressed-tensors", quantization_status="compressed", config_groups=named, **more)


def wrapped(modules: dict[str, str], change: Callable[[str], str]) -> dict[str, str]:
    return {change(module): quantiser for module, quantiser in modules.items()}


FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
MX4 = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True, "dynamic": False}
BLOCKS = q.fp8_block(24, 40)
NATIVE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
#: The tables of the tiny model, with the scale of each.
TABLES = {
    f"model.language_model.layers.{i}.ple.ple_embedding.ngram_embedding.weight_scale": q.TABLE_SCALE for i in (0, 2)
}
KV_SCALES = {f"backbone.layers.5.mixer.{x}_proj.{x}_scale": torch.tensor(0.1) for x in "kv"}

RECIPES = {
    # 3 Super and Ultra: experts, shared experts and Mamba in two formats, layer by layer; FP8 KV cache.
    "nemotron super": Recipe(
        "nemotron_h_latent",
        [
            (r"mtp|lm_head|latent|layers\.5\.", None),
            (r"layers\.0\.mixer\.in_proj", None),
            (r"\.experts\.", q.nvfp4),
            ("", q.fp8),
        ],
        nemotron_super,
        "64 NVFP4, 15 FP8 per tensor",
        extra=KV_SCALES,
    ),
    # 3 Nano: one format for all, and exclusions as globs, whole blocks and names of projections.
    "nemotron nano": Recipe(
        "nemotron_h_moe",
        [(r"lm_head|layers\.5\.|layers\.4\.mixer\.(in|out)_proj", None), ("", q.nvfp4)],
        lambda modules: modelopt_file(
            quant_algo="NVFP4",
            kv_cache_quant_algo=None,
            group_size=16,
            exclude_modules=["lm_head", "backbone.layers.5.mixer.*", "backbone.layers.4*", "*.gate", "*.conv1d"],
        ),
        "78 NVFP4",
    ),
    # 3 Nano 4B: NVFP4 embedding, FP8 head without activation scale, some down_proj in FP8.
    "nemotron nano 4b": Recipe(
        "nemotron_h_dense",
        [
            (r"lm_head", q.fp8_weight_only),
            (r"layers\.3\.mixer\.down_proj", q.fp8),
            (r"layers\.5\.", None),
            (r"embeddings", q.nvfp4),
            ("", q.nvfp4),
        ],
        lambda modules: in_config(quant_method="modelopt", **mixed(modules)),
        "16 NVFP4, 2 FP8 per tensor",
    ),
    # 3.5 Lightning: weight-only NVFP4, and a table under the names that transformers has inside.
    "nemotron lightning": Recipe(
        "nemotron_h_moe",
        [(r"layers\.5\.", None), (r"mixer\.(in|out)_proj", q.fp8), ("", q.nvfp4_weight_only)],
        lambda modules: in_config(
            quant_method="modelopt_mixed",
            **mixed(wrapped(modules, lambda module: module.replace("backbone.", "model."))),
        ),
        "73 NVFP4, 8 FP8 per tensor",
    ),
    # Blocks of 24 x 40 fit neither heads nor widths: segments of fused projections share scales.
    "qwen3-next fp8": Recipe(
        "qwen3_next",
        [(r"in_proj_ba|shared_expert_gate|lm_head|mtp\.fc", None), ("", BLOCKS)],
        lambda modules: in_config(
            **NATIVE,
            modules_to_not_convert=[
                "lm_head",
                "mtp.fc",
                *(f"model.layers.{i}.linear_attn.in_proj_ba" for i in range(3)),
            ],
        ),
        "125 FP8 in blocks of 24x40",
    ),
    # The description of a wrapper, at the level of its text model; fused names for projections that are not fused.
    "qwen3.5 fp8": Recipe(
        "qwen3_5_vl",
        [(r"in_proj_[ab]|lm_head|mtp\.", None), ("", BLOCKS)],
        lambda modules: {
            "config.json": {
                "text_config": {
                    "quantization_config": NATIVE
                    | {"modules_to_not_convert": ["model.visual", "lm_head", "in_proj_ba", "mtp"]}
                }
            }
        },
        "25 FP8 in blocks of 24x40",
    ),
    # Fused experts [E, N, K] with block scales of their own.
    "qwen3.5 moe fp8": Recipe(
        "qwen3_5_moe_vl",
        [(r"in_proj_[ab]|lm_head|mtp\.|shared_expert_gate", None), ("", BLOCKS)],
        lambda modules: in_config(
            **NATIVE, modules_to_not_convert=["visual", "lm_head", "in_proj_a", "in_proj_b", "mtp"]
        ),
        "33 FP8 in blocks of 24x40",
    ),
    # Experts NVFP4 and attention FP8, in a table with another wrapper's prefix than the tensors have.
    "qwen3.6 moe nvfp4": Recipe(
        "qwen3_5_moe_vl",
        [(r"mtp|lm_head|linear_attn|shared_expert_gate", None), ("self_attn", q.fp8), ("", q.nvfp4)],
        lambda modules: modelopt_file(
            **mixed(wrapped(modules, lambda module: module.replace("model.language_model.", "language_model.model."))),
            exclude_modules=["model.visual*", "lm_head", "mtp*"],
        ),
        "108 NVFP4, 4 FP8 per tensor",
        write_saved,
    ),
    # llm-compressor: two groups, the first found by expressions.
    "qwen3.5 compressed": Recipe(
        "qwen3_5_text",
        [(r"linear_attn\.in_proj_[ab]|lm_head|mtp", None), (r"self_attn", q.fp8_channel), ("", q.compressed_nvfp4)],
        lambda modules: compressed(
            {"targets": ["Linear"], "weights": FLOAT4, "format": "nvfp4-pack-quantized"},
            {"targets": ["re:.*self_attn.*_proj$"], "weights": FLOAT8, "format": "float-quantized"},
            format="mixed-precision",
            ignore=["re:.*in_proj_[ab]$", "lm_head", "re:^mtp.*"],
            transform_config={},
            sparsity_config={},
        ),
        "21 NVFP4, 4 FP8 per channel",
    ),
    "kimi mxfp4": Recipe(
        "kimi_linear",
        [(r"\.experts\.", q.mxfp4), ("", None)],
        lambda modules: compressed(
            {"targets": ["re:.*block_sparse_moe\\.experts\\..*"], "weights": MX4},
            format="mxfp4-pack-quantized",
            ignore=[],
        ),
        "72 MXFP4",
    ),
    # As published: at the level of the text model, and by classes, which other linear layers than those excluded have, too.
    "kimi-k3 mxfp4": Recipe(
        "kimi_k3",
        [(r"\.experts\.", q.mxfp4), ("", None)],
        lambda modules: {
            "config.json": {
                "text_config": compressed(
                    {"targets": ["Linear"], "weights": MX4 | {"scale_dtype": "torch.uint8", "observer": "minmax"}},
                    format="mxfp4-pack-quantized",
                    ignore=[
                        *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
                        *("re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"),
                    ],
                )["config.json"]
            }
        },
        "96 MXFP4",
    ),
    # KDA, hyper-connections, indexers and kv_b stay as they are.
    "glm-5.3 fp8": Recipe(
        "glm5_next",
        [(r"layers\.[012]\.self_attn|indexer|kv_b_proj|lm_head|eh_proj|hc_", None), ("", BLOCKS)],
        lambda modules: in_config(
            **NATIVE,
            modules_to_not_convert=[
                *("lm_head", "model.visual", "indexer", "kv_b_proj", "eh_proj", "mlp.gate"),
                *(f"model.language_model.layers.{i}.self_attn" for i in range(3)),
            ],
        ),
        "119 FP8 in blocks of 24x40",
    ),
    # Qwen's: routed experts in blocks, those of the MTP layer too, and the table in E4M3 with one scale for all shards.
    "qwen3.8-flash-next fp8": Recipe(
        "qwen4_exp_vl",
        [("ngram_embedding", q.ngram_shard), (r"\.experts\.", BLOCKS), ("", None)],
        lambda modules: in_config(
            **NATIVE,
            modules_to_convert=[name.removesuffix(".weight_scale") for name in TABLES],
            modules_to_not_convert=[
                "lm_head",
                "visual",
                "linear_attn",
                "self_attn",
                "shared_expert",
                "hyper_connection",
            ],
        ),
        "32 FP8 in blocks of 24x40, 6 FP8 per tensor",
        shared=TABLES,
    ),
    # NVIDIA's: experts in NVFP4, those of the MTP layer in blocks as Qwen stores them.
    "qwen3.8-flash-next nvfp4": Recipe(
        "qwen4_exp_vl",
        [
            ("ngram_embedding", q.ngram_shard),
            (r"mtp.*\.experts\.", q.fp8_blocks),
            (r"\.experts\.", q.nvfp4),
            ("", None),
        ],
        flash_next_nvidia,
        "24 FP8 in blocks of 128x128, 8 NVFP4, 6 FP8 per tensor",
        shared=TABLES,
    ),
    # RadixArk's: one format for all, and exclusions that name the table although it is in FP8.
    "qwen3.8-flash-next nvfp4, table excluded": Recipe(
        "qwen4_exp_vl",
        [("ngram_embedding", q.ngram_shard), ("mtp", None), (r"\.experts\.", q.nvfp4), ("", None)],
        lambda modules: modelopt_file(
            quant_algo="NVFP4",
            group_size=16,
            exclude_modules=[
                *("model.embed_tokens", "mtp.*", "model.mtp.*", "*.self_attn.*", "*.linear_attn.*", "*.mlp.gate*"),
                *("*.mlp.shared_expert.*", "*.mlp.shared_expert_gate*", "*hyper_connection*", "*.ple.*"),
                *("model.visual.*", "model.language_model.embed_tokens", "lm_head"),
            ],
        ),
        "8 NVFP4, 6 FP8 per tensor",
        shared=TABLES,
    ),
    # NVIDIA's: experts in NVFP4 and all projections of attention in blocks.
    "kimi-k3 nvfp4": Recipe(
        "kimi_k3",
        [(r"\.experts\.", q.nvfp4), (r"self_attn\.\w+_proj", q.fp8_pb_wo), ("", None)],
        kimi_k3_nvidia,
        "96 NVFP4, 36 FP8 in blocks of 128x128",
    ),
    # Exclusions by the ends of names: b_proj is not kv_b_proj.
    "ling fp8": Recipe(
        "bailing_hybrid",
        [(r"\.b_proj|lm_head|word_embeddings|layers\.1\.attention\.g_proj|eh_proj", None), ("", BLOCKS)],
        lambda modules: in_config(
            **NATIVE, modules_to_not_convert=["b_proj", "lm_head", "1.attention.g_proj", "eh_proj", "mlp.gate"]
        ),
        "137 FP8 in blocks of 24x40",
    ),
    "ling int4": Recipe(
        "bailing_hybrid_clamp",
        [(r"attention|lm_head|eh_proj", None), ("", q.int4(32))],
        lambda modules: compressed(
            {"targets": ["Linear"], "weights": INT4},
            format="pack-quantized",
            ignore=["lm_head", "re:.*attention.*", "re:.*mlp\\.gate$", "model.layers.4.eh_proj"],
        ),
        "111 int4 in groups of 32",
    ),
}


def choice(rules: Rules, name: str) -> Quantiser | None:
    if re.search(NEVER, name) and not any(rule in EMBEDDINGS and rule in name for rule, _ in rules):
        return None
    return next(quantiser for expression, quantiser in rules if re.search(expression, name))


def merge(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    nested = {k: merge(config[k], v) if k == "text_config" else v for k, v in more.items()}
    return config | nested


def folders(
    recipe: Recipe, root: Path, edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None
) -> tuple[Path, Path]:
    """The quantised checkpoint in three shards, and its dequantised twin; activations are bfloat16."""
    config, tensors = read_folder(recipe.write(build(recipe.model), root / "full"))
    config.get("text_config", config)["dtype"] = "bfloat16"
    stored, plain = quantised(tensors, lambda name: choice(recipe.rules, name))
    names = {name for name in tensors if plain[name] is not tensors[name]}
    modules = {
        name.removesuffix(".weight"): getattr(choice(recipe.rules, name), "__name__", "") for name in sorted(names)
    }
    files = recipe.describe(modules)
    stored |= recipe.extra | recipe.shared
    edit(stored)
    packed = write_folder(root / "packed", merge(config, files.pop("config.json", {})), stored, 3)
    for file, content in files.items():
        (packed / file).write_text(json.dumps(content))
    return packed, write_folder(root / "plain", config, plain, 2)


def relabelled(packed: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the table of a folder, in each of the files that have it."""
    for name, inside in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        path = packed / name
        data = json.loads(path.read_text()) if path.exists() else {}
        if inside in data:
            change(data[inside]["quantized_layers"])
            path.write_text(json.dumps(data))
