"""Folders that are not a plain Hugging Face checkpoint, told apart so that the message says what they are."""

from __future__ import annotations

from pathlib import Path

from trtllm_replayssm.errors import CheckpointError

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
