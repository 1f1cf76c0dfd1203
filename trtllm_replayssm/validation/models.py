"""Checkpoints of the tiny models: made by transformers where it is installed, else with weights of our own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, rank_file
from trtllm_replayssm.builders.convert import convert
from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.hf.config import text_section
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.demo.catalogue import DemoModel
from trtllm_replayssm.demo.models import drawn, save_model
from trtllm_replayssm.replay import ReplayConfig


def make_checkpoint(description: DemoModel, folder: Path, dtype: str) -> Any:
    """Writes ``folder/checkpoint`` in ``dtype``; returns the transformers model, or None where transformers has none."""
    if transformers_has(description):
        model = save_model(description, folder / "model")
        convert(folder / "model", folder / "checkpoint", dtype, warn=lambda message: None)
        return model
    values = {"architectures": [description.model_class], **description.arguments}
    decoder = find_family(values, {}).decoder()
    config = CheckpointConfig(
        hf_architecture=description.model_class,
        dtype=dtype,
        tp_size=1,
        decoder=decoder,
        replay=ReplayConfig(),
        eos_token_ids=(text_section(values)["eos_token_id"],),
    )
    write_checkpoint(folder / "checkpoint", config, random_weights(decoder))
    return None


def transformers_has(description: DemoModel) -> bool:
    """Whether the installed transformers, if there is one, knows the model."""
    if find_spec("transformers") is None:
        return False
    import transformers

    return all(hasattr(transformers, name) for name in (description.config_class, description.model_class))


def random_weights(decoder: HybridDecoder, seed: int = 0) -> dict[str, Tensor]:
    """Values in the range that trained weights of these names have."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in decoder.parameters().items():
        # The name tells what the weight is for; the final norm's does not.
        told = "norm.weight" if name.endswith("ln_f.weight") else name
        weights[name] = drawn(told, torch.randn(parameter.shape, generator=generator), zero_centred=False)
    return weights


def write_checkpoint(folder: Path, config: CheckpointConfig, weights: dict[str, Tensor]) -> None:
    """What ``convert`` would have written for one rank."""
    folder.mkdir(parents=True)
    layout = config.rank_layout()
    stored = {name: weight.to(layout[name][0]).contiguous() for name, weight in weights.items()}
    save_file(stored, folder / rank_file(0), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
