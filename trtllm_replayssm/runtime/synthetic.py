"""Engines with random weights, made where they run: a model's speed does not depend on what it was trained to say.

Weights are drawn on the device, tensor by tensor, so that a model needs no memory of the host and no file. Their scales keep
activations near 1 and decays where trained models have them; the text means nothing. Branches add little to what a token's
embedding is, so that tokens stay as unlike as they were drawn and choose all experts alike, as those of trained models do.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.families.registry import find_family
from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.console import bytes_text
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.implementation import PluginImpl, implementation
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.build import engine_config
from trtllm_replayssm.runtime.devices import check_memory, resolve_device
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import BuildOptions
from trtllm_replayssm.runtime.ranks import process_group

log = logging.getLogger(__name__)

#: Ranges of exp(A_log) and of softplus(dt_bias) at which Mamba-2 and its successors are initialised for training.
DECAY_RATES, TIME_STEPS = (1.0, 16.0), (1e-3, 1e-1)
#: Ends of the names of matrices whose products are added to the residual stream.
OUTPUTS = ("out_proj.weight", "dense.weight", "down.weight", "latent_out.weight")


def synthetic_checkpoint(config_file: str | Path, dtype: str = "bfloat16", tp_size: int = 1) -> CheckpointConfig:
    """What ``convert`` would say of a model of which only config.json is at hand.

    Raises CheckpointError or UnsupportedModelError for a config that is not one of a supported model.
    """
    path = Path(config_file)
    if not path.is_file():
        raise UserError(f"{path} is not a file", "give the config.json of a model")
    family = find_family(read_config(path), {})
    architecture = type(family).architectures[0]
    config = CheckpointConfig(architecture, dtype, tp_size, family.decoder(), ReplayConfig())
    config.rank_decoder()
    return config


def synthetic_engine(
    checkpoint: CheckpointConfig,
    options: BuildOptions,
    device: str | torch.device | None = None,
    seed: int = 0,
    plugin_impl: PluginImpl = "auto",
) -> Engine:
    """This process's rank of an engine for ``checkpoint`` with random weights. It has no folder and no tokenizer.

    Raises EngineError when weights and state do not fit into the device's memory.
    """
    where, config = resolve_device(device), engine_config(checkpoint, options)
    group = process_group(config.world_size, where)
    rank = 0 if group is None else group.rank()
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in checkpoint.rank_layout().values())
    check_memory(where, size, config.max_batch_size, config.slot_bytes(), config.built)
    # Rank 0 speaks for all.
    log.log(logging.INFO if rank == 0 else logging.DEBUG, "drawing %s of random weights", bytes_text(size))
    return Engine(
        folder=Path(f"synthetic-{checkpoint.hf_architecture}"),
        config=config,
        decoder=config.decoder(),
        weights=synthetic_weights(checkpoint, where, seed, rank),
        device=where,
        rank=rank,
        group=group,
        plugins=implementation(plugin_impl, where),
    )


def synthetic_weights(
    checkpoint: CheckpointConfig, device: torch.device, seed: int = 0, rank: int = 0
) -> dict[str, Tensor]:
    """One rank's weights by name, on the device; ranks differ where they hold different parts."""
    weights, parameters = {}, checkpoint.decoder.parameters(checkpoint.tp_size)
    decoder = checkpoint.decoder
    for name, (dtype, shape) in checkpoint.rank_layout().items():
        parameter, scale = parameters[name], shape[-1] ** -0.5
        if name.endswith(OUTPUTS):
            scale *= len(decoder.layers) ** -0.5
        elif name == "transformer.vocab_embedding.weight" and not decoder.tie_embeddings:
            scale = 1.0
        part = 0 if parameter.axis is None else rank
        # 32 bits, because that is all that a CPU's generator takes of its seed.
        generator = torch.Generator(device).manual_seed(crc32(f"{seed} {part} {name}".encode()))
        empty = torch.empty(shape, dtype=dtype, device=device)
        weights[name] = filled(empty, name, scale, parameter.nonzero, generator)
    return weights


def filled(tensor: Tensor, name: str, scale: float, nonzero: bool, generator: torch.Generator) -> Tensor:
    """The tensor with plausible values for a parameter of that name, which a trained model may not leave 0 if ``nonzero``.

    scale: standard deviation of a matrix's elements.
    """
    short = name.rpartition(".")[2]
    if short == "A_log":
        return tensor.uniform_(*DECAY_RATES, generator=generator).log_()
    if short == "dt_bias":
        steps = tensor.uniform_(*map(math.log, TIME_STEPS), generator=generator).exp_()
        return steps.expm1_().log_()  # the inverse of softplus
    if tensor.ndim == 1:
        # Norms that multiply and skips are 1; biases and norms that multiply by 1 + w are 0.
        return tensor.fill_(1.0 if nonzero or short == "D" else 0.0)
    return tensor.normal_(0.0, scale, generator=generator)
