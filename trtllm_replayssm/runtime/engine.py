"""A loaded engine: one rank's weights on a device, ready to run steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.errors import CheckpointError, EngineError
from trtllm_replayssm.network.torch_backend import TorchNetwork
from trtllm_replayssm.runtime.build import build_engine
from trtllm_replayssm.runtime.engine_config import REBUILD, BuildOptions, EngineConfig, engine_file
from trtllm_replayssm.runtime.memory import check_memory
from trtllm_replayssm.runtime.rank_files import RANK_FORMAT, check_tensors, data_bytes

__all__ = ["BuildOptions", "Engine", "PluginImpl", "build_engine"]

#: Who computes the plugin layers. ``auto`` is the fastest that the device has.
PluginImpl = Literal["auto", "reference", "cuda"]


@dataclass(frozen=True)
class Engine:
    """One rank of an engine.

    folder: where it was loaded from (for the tokenizer). decoder: as this rank sees it. weights: by name, on ``device``.
    group: the tensor-parallel process group, None with one rank. plugin_impl: ``reference`` or ``cuda``.
    """

    folder: Path
    config: EngineConfig
    decoder: HybridDecoder
    weights: Mapping[str, Tensor]
    device: torch.device
    rank: int = 0
    group: dist.ProcessGroup | None = None
    plugin_impl: PluginImpl = "reference"

    @classmethod
    def load(
        cls,
        engine_dir: str | Path,
        rank: int | None = None,
        device: str | torch.device | None = None,
        plugin_impl: PluginImpl = "auto",
    ) -> Engine:
        """Load one rank of an engine folder. On a CPU the weights are mapped and read from disk when first used.

        rank: None for this process's rank in torch.distributed, or 0. device: None for this rank's GPU where there is
        one, else the CPU.

        Raises EngineError when versions, files or the machine do not fit.
        """
        folder = Path(engine_dir)
        config = EngineConfig.read(folder)
        group = process_group(config.world_size)
        rank = rank if rank is not None else (0 if group is None else dist.get_rank(group))
        file = checked_file(folder, config, rank)
        where = resolve_device(device)
        check_memory(where, data_bytes(file), config.max_batch_size, config.slot_bytes())
        return cls(
            folder=folder,
            config=config,
            decoder=config.decoder(),
            weights=load_weights(file.path, where),
            device=where,
            rank=rank,
            group=group,
            plugin_impl=resolve_plugin_impl(plugin_impl, where),
        )

    def network(self, pools: Mapping[str, Tensor], step: Tensor, kv_len: int) -> TorchNetwork:
        """The backend of one step; see TorchNetwork for the arguments."""
        return TorchNetwork(self.weights, pools, step, self.config.checkpoint.torch_dtype, kv_len, self.group)


def process_group(world_size: int) -> dist.ProcessGroup | None:
    """The group of all ranks; None with one rank. Raises EngineError unless ``world_size`` processes have joined."""
    joined = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if joined != world_size:
        raise EngineError(
            f"the engine was built for {world_size} ranks, but {joined} are running",
            f"trtllm-replayssm generate starts them by itself; other programs run under torchrun --nproc_per_node {world_size}",
        )
    return dist.group.WORLD if world_size > 1 else None


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
        parameters = checkpoint.decoder.parameters(config.world_size)
        check_tensors(file, parameters, checkpoint.torch_dtype, config.world_size)
    except CheckpointError as error:
        raise EngineError(error.message, REBUILD) from None
    return file


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device itself, or by default this process's GPU where there is one. Raises EngineError when it is not there."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    try:
        where = torch.device(device)
    except RuntimeError:
        raise EngineError(f"device {device!r} is not known", "use cpu, cuda or cuda:N") from None
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (where.index or 0) >= count:
            raise EngineError(f"device {where} is not there; this machine has {count} CUDA devices", "use --device cpu")
        return torch.device("cuda", where.index or 0)
    if where.type != "cpu":
        raise EngineError(f"device {where} is not supported", "use cpu, cuda or cuda:N")
    return where


def resolve_plugin_impl(plugin_impl: PluginImpl, device: torch.device) -> PluginImpl:
    """What ``plugin_impl`` means on the device. Raises EngineError for one that it does not have."""
    if plugin_impl not in ("auto", "reference", "cuda"):
        raise EngineError(f"plugin_impl {plugin_impl!r} is not known", "use auto, reference or cuda")
    if plugin_impl == "cuda":
        raise EngineError(f"plugin_impl cuda is not available on {device}", "use auto or reference")
    return "reference"


def load_weights(path: Path, device: torch.device) -> dict[str, Tensor]:
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
