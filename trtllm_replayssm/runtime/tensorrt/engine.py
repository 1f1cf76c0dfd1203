"""Loading an engine of the flavour ``tensorrt``: what must fit, and the plans on the device."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trtllm_replayssm.compat import TensorRT, collector_paused, load_tensorrt
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.plugins.implementation import Implementation
from trtllm_replayssm.plugins.tensorrt.quick import register_plugins
from trtllm_replayssm.runtime.devices import check_memory, made_current
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import REBUILD, EngineConfig
from trtllm_replayssm.runtime.tensorrt.models import plan_file, plan_models, state_file
from trtllm_replayssm.runtime.tensorrt.record import PlanRecord


@dataclass(frozen=True)
class TensorRTEngine(Engine):
    """One rank of an engine whose steps TensorRT executes. weights: the few that a session itself needs.

    cuda_engines: TensorRT's ICudaEngine of each plan. runtime: what made them, which they need.
    """

    tensorrt: TensorRT = field(kw_only=True)
    record: PlanRecord = field(kw_only=True)
    cuda_engines: Mapping[str, Any] = field(kw_only=True)
    runtime: Any = field(kw_only=True)

    @property
    def prefill_tokens(self) -> int:
        return self.record.prefill_tokens

    @property
    def gather_context_logits(self) -> bool:
        return self.record.gather_context_logits


def load_plans(
    folder: Path,
    config: EngineConfig,
    record: PlanRecord,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    plugins: Implementation,
) -> TensorRTEngine:
    """Load one rank. plugins: compute what a session does beside the plans (materialise).

    Raises EngineError, before anything large is read, when TensorRT, the GPU or the files are not those of the build, and
    for a plan that TensorRT does not take.
    """
    tensorrt = load_tensorrt(("tensorrt",))
    check_machine(folder, record, tensorrt, device)
    if record.stripped:
        raise EngineError(f"{folder} holds plans without weights", "put them back with: trtllm-replayssm refit")
    paths = {plan: folder / plan_file(rank, plan) for plan in plan_models(config)}
    check_files(folder, record)
    sizes = sum(record.files[path.name] for path in paths.values())
    check_memory(device, 0 if record.weight_streaming else sizes, config.max_batch_size, config.slot_bytes())
    log = tensorrt_log(tensorrt.module)
    if record.just_in_time:
        register_plugins(tensorrt)
    with made_current(device), collector_paused():
        runtime = tensorrt.module.Runtime(log)
        cuda_engines = {plan: deserialised(path, runtime, log) for plan, path in paths.items()}
        for plan, cuda_engine in cuda_engines.items():
            if record.weight_streaming:
                cuda_engine.weight_streaming_budget_v2 = cuda_engine.get_weight_streaming_automatic_budget()
            check_tensors(paths[plan], cuda_engine, config, plan)
    state = folder / state_file(rank)
    weights = load_file(state, device=str(device)) if state.name in record.files else {}
    return TensorRTEngine(
        folder=folder,
        config=config,
        decoder=config.decoder(),
        weights=weights,
        device=device,
        rank=rank,
        group=group,
        tensorrt=tensorrt,
        record=record,
        cuda_engines=cuda_engines,
        runtime=runtime,
        plugins=plugins,
    )


def check_machine(folder: Path, record: PlanRecord, tensorrt: TensorRT, device: torch.device) -> None:
    """Raises EngineError unless TensorRT and GPU are those that the plans were built with and for."""
    if tensorrt.version_text != record.tensorrt_version:
        raise EngineError(
            f"{folder} was built with TensorRT {record.tensorrt_version}, and {tensorrt.version_text} is installed",
            f"{REBUILD}; or install the version that built it",
        )
    found = "{}.{}".format(*found_capability(folder, device))
    if found != record.compute_capability:
        raise EngineError(
            f"{folder} was built for compute capability {record.compute_capability}, and {device} has {found}",
            "build it again on a GPU of the kind that is to run it",
        )


def found_capability(folder: Path, device: torch.device) -> tuple[int, int]:
    """The device's compute capability. Raises EngineError for a CPU."""
    if device.type != "cuda":
        raise EngineError(
            f"{folder} runs on a GPU only, and not on {device}",
            "build it with --engine_flavour embedded to run anywhere",
        )
    return torch.cuda.get_device_capability(device)


def check_files(folder: Path, record: PlanRecord) -> None:
    """Raises EngineError unless all files of the build are there in their sizes."""
    for name, size in record.files.items():
        path = folder / name
        if not path.is_file():
            raise EngineError(f"{path} is missing", REBUILD)
        if path.stat().st_size != size:
            raise EngineError(f"{path} has {path.stat().st_size} bytes, but was built with {size}", REBUILD)


def deserialised(path: Path, runtime: Any, log: Any) -> Any:
    """The plan as an ICudaEngine. The file is mapped: TensorRT copies what it needs. Raises EngineError with its reason."""
    log.forget()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cuda_engine = runtime.deserialize_cuda_engine(content)
    if cuda_engine is None:
        raise EngineError(f"{path} cannot be loaded: {log.first_error()}", REBUILD)
    return cuda_engine


def check_tensors(path: Path, cuda_engine: Any, config: EngineConfig, plan: str) -> None:
    """Raises EngineError unless the plan has the inputs and outputs that this version binds."""
    names = {cuda_engine.get_tensor_name(place) for place in range(cuda_engine.num_io_tensors)}
    pools = {"cursors", *plan_models(config)[plan].pools}
    wanted = {*pools, *(f"{name}_out" for name in pools), *STEP_TENSORS}
    optional = {"hidden_states", "previous_hidden"}
    if missing := sorted(wanted - names):
        raise EngineError(f"{path} has no tensor {missing[0]}, which this version binds", REBUILD)
    if surplus := sorted(names - wanted - optional):
        raise EngineError(f"{path} has a tensor {surplus[0]}, which this version does not know", REBUILD)


#: Inputs and outputs of every plan besides its state.
STEP_TENSORS = ("input_ids", "logit_positions", "slot_ids", "query_lens", "modes", "step_tokens", "logits")
