"""A loaded engine: one rank's weights on a device, ready to run steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.errors import CheckpointError, EngineError
from trtllm_replayssm.network.packed import StoredWeight, assembled
from trtllm_replayssm.network.scaled import check_products, suited
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.plugins.implementation import Implementation, PluginImpl, implementation, reference
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.devices import check_memory, resolve_device
from trtllm_replayssm.runtime.engine_config import REBUILD, BuildOptions, EngineConfig, engine_file
from trtllm_replayssm.runtime.rank_files import RANK_FORMAT, check_tensors, data_bytes
from trtllm_replayssm.runtime.ranks import process_group

__all__ = ["BuildOptions", "Engine", "PluginImpl", "build_engine"]


@dataclass(frozen=True)
class Engine:
    """One rank of an engine.

    folder: where it was loaded from (for the tokenizer). decoder: as this rank sees it. weights: by name, on ``device``;
    those that stay quantised are PackedWeight.
    group: the tensor-parallel process group, None with one rank. plugins: who computes the plugin layers. scaled_matmul: see
    ``load``.
    """

    folder: Path
    config: EngineConfig
    decoder: HybridDecoder
    weights: Mapping[str, Any]
    device: torch.device
    rank: int = 0
    group: dist.ProcessGroup | None = None
    plugins: Implementation = field(default_factory=reference)
    scaled_matmul: bool = False

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        rank: int | None = None,
        device: str | torch.device | None = None,
        plugin_impl: PluginImpl = "auto",
        scaled_matmul: bool = False,
    ) -> Engine:
        """Load one rank of an engine folder. On a CPU the weights are mapped and read from disk when first used.

        An engine of the flavour tensorrt comes as a TensorRTEngine, which sessions take all the same.
        rank: None for this process's rank in torch.distributed, or 0. device: None for this rank's GPU where there is
        one, else the CPU. scaled_matmul: multiply FP8 weights that were kept with activations rounded to FP8 (network/scaled).

        Raises EngineError when versions, files or the machine do not fit.
        """
        folder = Path(engine_dir)
        config = EngineConfig.read(folder)
        where = resolve_device(device)
        group = process_group(config.world_size, where)
        rank = rank if rank is not None else (0 if group is None else dist.get_rank(group))
        plugins = implementation(plugin_impl, where)
        if scaled_matmul:
            check_scaled_matmul(folder, config)
            check_products(where)
        if config.tensorrt is not None:
            from trtllm_replayssm.runtime.tensorrt.engine import load_plans

            return load_plans(folder, config, config.tensorrt, rank, where, group, plugins)
        file = checked_file(folder, config, rank)
        check_memory(where, data_bytes(file), config.max_batch_size, config.slot_bytes())
        return cls(
            folder=folder,
            config=config,
            decoder=config.decoder(),
            weights=load_weights(file.path, where, config.checkpoint),
            device=where,
            rank=rank,
            group=group,
            plugins=plugins,
            scaled_matmul=scaled_matmul,
        )

    def network(self, pools: Mapping[str, Tensor], step: Tensor, kv_len: int) -> TorchNetwork:
        """The backend of one step; see TorchNetwork for the arguments."""
        kind = TorchNetwork
        if self.plugins.name == "cuda":
            from trtllm_replayssm.network.cuda_backend import CudaNetwork

            kind = CudaNetwork
        dtype = self.config.checkpoint.torch_dtype
        return kind(self.weights, pools, step, dtype, kv_len, self.group, self.plugins, self.scaled_matmul)


def checked_file(folder: Path, config: EngineConfig, rank: int) -> SafetensorsFile:
    """The rank's file. Raises EngineError unless all files of this build are there, and this one is sound."""
    if not 0 <= rank < config.world_size:
        raise EngineError(f"{folder} has no rank {rank}; it was built for {config.world_size}")
    for other, size in enumerate(config.rank_bytes):
        path = folder / engine_file(other)
        if not path.is_file():
            raise EngineError(f"{path} is missing; the engine has {config.world_size} rank files", REBUILD)
        if path.stat().st_size != size:
            raise EngineError(f"{path} has {path.stat().st_size} bytes, but was built with {size}", REBUILD)
    checkpoint = config.checkpoint
    expected = {
        "format": RANK_FORMAT,
        "rank": str(rank),
        "world_size": str(config.world_size),
        "fingerprint": config.fingerprint,
    }
    try:
        file = SafetensorsFile(folder / engine_file(rank))
        for name, value in expected.items():
            if file.metadata.get(name) != value:
                raise CheckpointError(f"{file.path} belongs to another build: its {name} is not that of config.json")
        check_tensors(file, checkpoint.rank_layout())
    except CheckpointError as error:
        raise EngineError(error.message, REBUILD) from None
    return file


def check_scaled_matmul(folder: Path, config: EngineConfig) -> None:
    """Raises EngineError where FP8 products are asked for in vain."""
    if config.tensorrt is not None:
        raise EngineError(
            f"{folder} is run by TensorRT, which multiplies as it was built",
            "leave out --scaled_matmul; build has it, too",
        )
    checkpoint = config.checkpoint
    parameters = checkpoint.decoder.parameters(checkpoint.tp_size)
    shapes = {name: parameters[name].local_shape(checkpoint.tp_size) for name in checkpoint.packings}
    if not any(suited(p, shapes[name], checkpoint.torch_dtype) for name, p in checkpoint.packings.items()):
        raise EngineError(
            f"{folder} has no FP8 matrices with a scale a row, for activations in bfloat16",
            "convert FP8 weights by tensor or channel with --dtype bfloat16 --quantization keep, or leave out --scaled_matmul",
        )


def load_weights(path: Path, device: torch.device, checkpoint: CheckpointConfig) -> dict[str, StoredWeight]:
    with safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return assembled(tensors, checkpoint.packings, checkpoint.torch_dtype)
