"""Folders that are not a plain Hugging Face checkpoint, told apart so that the message says what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

#: Patterns of files that hold weights in another form, and what to do about them.
OTHER_WEIGHTS = (
    (("*.gguf",), "GGUF files", "use the safetensors files of the original checkpoint"),
    (
        ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt"),
        "pickled weights, which can run code when they are read",
        "load it with transformers, if you trust it, and write it again with save_pretrained",
    ),
    (("*.h5", "*.msgpack", "*.onnx"), "weights of another framework", "use the safetensors files"),
)
#: Keys of config.json that describe quantised weights.
QUANTISATION_KEYS = ("quantization_config", "compression_config", "quantization")


def refuse_layout(path: Path) -> None:
    """Raises CheckpointError for adapters, and for folders whose only weights are not safetensors."""
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} holds an adapter, not a whole model", "merge it into its base model (peft: merge_and_unload) first"
        )
    if any(path.glob("*.safetensors*")):
        return
    for patterns, what, hint in OTHER_WEIGHTS:
        found = sorted(file.name for pattern in patterns for file in path.glob(pattern))
        if found:
            raise CheckpointError(f"{path} holds only {what}: {found[0]}", hint)


def refuse_quantised(path: Path, config: dict[str, Any]) -> None:
    """Raises UnsupportedModelError with the format's name when the checkpoint says that its weights are quantised.

    A wrapper's text config may carry the description, so both levels are searched.
    """
    levels = [config, *(section for section in config.values() if isinstance(section, dict))]
    described = [level[key] for level in levels for key in QUANTISATION_KEYS if level.get(key)]
    if (path / "hf_quant_config.json").exists():
        described.insert(0, modelopt_description(path / "hf_quant_config.json"))
    if described:
        raise UnsupportedModelError(
            f"{path} is quantised ({format_name(described[0])}), which is not converted yet", "use the BF16 checkpoint"
        )


def modelopt_description(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {"quant_method": "modelopt", **data["quantization"]}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {"quant_method": "modelopt"}


def format_name(description: Any) -> str:
    """``modelopt NVFP4``, ``fp8``, ``compressed-tensors nvfp4-pack-quantized``, ``mlx 4 bits`` ..."""
    if not isinstance(description, dict):
        return str(description)
    if "quant_method" not in description and "bits" in description:
        return f"mlx {description['bits']} bits"
    named = (description.get(key) for key in ("quant_method", "quant_algo", "format"))
    return " ".join(str(part) for part in named if part) or "unknown format"
