"""From a TensorRT-LLM checkpoint to the plans of an engine folder."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, load_rank
from trtllm_replayssm.compat import TensorRT, load_tensorrt
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.network.packed import without_input_scales
from trtllm_replayssm.network.tensorrt.build import EmittedStep, build_plan, emit_step
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.network.tensorrt.options import Report
from trtllm_replayssm.network.tensorrt.packed import stays_packed
from trtllm_replayssm.network.tensorrt.plugin_layer import CutPlugins, PluginLayer
from trtllm_replayssm.network.tensorrt.quick_plugins import QuickPlugins
from trtllm_replayssm.network.tensorrt.recording import RecordedPlugins, recorded_network, recording_tensorrt
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig, engine_file
from trtllm_replayssm.runtime.tensorrt.models import plan_file, plan_models, state_file, state_weights, step_sizes
from trtllm_replayssm.runtime.tensorrt.record import PlanRecord

log = logging.getLogger(__name__)

#: Capability whose network a dry run shows where no GPU is at hand: that of the newest that the kernels are released for.
SHOWN_CAPABILITY = (10, 3)
WITHOUT_TENSORRT = (
    "use --engine_flavour embedded, which needs neither TensorRT nor a GPU; --dry_run shows the network here"
)


@dataclass(frozen=True)
class Target:
    """What plans are made with, and for which GPU. plugins: adds the plugin layers, one for each network.

    network: an empty network and the builder it belongs to; no builder where nothing can be built.
    """

    tensorrt: TensorRT
    capability: tuple[int, int]
    plugins: Callable[[], PluginLayer]
    network: Callable[[], tuple[Any, Any]]


def tensorrt_builds_here() -> bool:
    """Whether TensorRT is installed, and finds a GPU to build for."""
    try:
        load_tensorrt(("tensorrt",))
    except EngineError:
        return False
    return torch.cuda.is_available()


def this_machine(aliased: bool = False, just_in_time: bool = False) -> Target:
    """Plans for this machine's GPU. Raises EngineError when TensorRT is not installed, or there is no GPU."""
    try:
        tensorrt = load_tensorrt(("tensorrt",))
    except EngineError as error:
        raise EngineError(error.message, f"{error.hint}; or {WITHOUT_TENSORRT}") from None
    if not torch.cuda.is_available():
        raise EngineError(
            f"TensorRT {tensorrt.version_text} builds on the GPU that will run the engine, and this machine has none",
            f"build there; or {WITHOUT_TENSORRT}",
        )
    return genuine(tensorrt, torch.cuda.get_device_capability(), aliased, just_in_time)


def genuine(
    tensorrt: TensorRT, capability: tuple[int, int], aliased: bool = False, just_in_time: bool = False
) -> Target:
    def network() -> tuple[Any, Any]:
        builder = tensorrt.builder(tensorrt_log(tensorrt.module))
        return tensorrt.create_network(builder), builder

    def plugins() -> PluginLayer:
        if not tensorrt.features.plugins:
            return CutPlugins()
        return QuickPlugins(tensorrt, capability, aliased, just_in_time)

    return Target(tensorrt, capability, plugins, network)


def any_machine() -> Target:
    """The best description of a network that this machine can give: by TensorRT, by TensorRT-RTX, or by this package."""
    if tensorrt_builds_here():
        return this_machine()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else SHOWN_CAPABILITY
    try:
        target = genuine(load_tensorrt(("tensorrt_rtx",)), capability)
        target.network()
        return target
    except EngineError:
        recording = recording_tensorrt()
        return Target(recording, capability, RecordedPlugins, lambda: (recorded_network(recording), None))


def emitted_plans(
    checkpoint_dir: Path, config: EngineConfig, rank: int, target: Target, scaled_matmul: bool = False
) -> Iterator[tuple[str, EmittedStep, Any]]:
    """File, network and builder of every plan of one rank. The weights are mapped from the checkpoint, not copied."""
    weights = load_rank(checkpoint_dir, rank)
    if not scaled_matmul:
        weights = without_input_scales(weights)
    for plan, model in plan_models(config).items():
        network, builder = target.network()
        step = emit_step(
            target.tensorrt,
            network,
            model,
            weights,
            target.plugins(),
            config.world_size,
            target.capability,
            with_step_tokens=True,
        )
        yield plan_file(rank, plan), step, builder


def write_plans(
    checkpoint_dir: Path,
    folder: Path,
    config: EngineConfig,
    options: BuildOptions,
    target: Target,
    phases: Report,
) -> EngineConfig:
    """Build all plans into the empty ``folder``; returns the config with their record, fingerprint and sizes.

    phases: told of the phases of TensorRT's builder; False stops it.
    Raises EngineError or UserError; see ``build_plan``.
    """
    sizes = step_sizes(config, options.opt_num_tokens, options.gather_context_logits)
    settings = replace(options.plan, capability=target.capability, aliased_plugins=options.aliased_state, report=phases)
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    if unpacked := unpacked_weights(config.checkpoint, target.capability):
        log.warning(
            "%d quantised weights become constants in %s, like %s: the GPU lacks their numbers, or their groups are uneven",
            len(unpacked),
            config.checkpoint.dtype,
            unpacked[0],
        )
    for rank in range(config.world_size):
        for name, step, builder in emitted_plans(checkpoint_dir, config, rank, target, options.scaled_matmul):
            content = build_plan(step, builder, sizes, settings)
            digest.update(content)
            with (folder / name).open("xb") as file:
                file.write(content)
            # As large as all weights of a rank, and not to be held while the next plan is built.
            del content
            # What one plan measured is not measured again for the next.
            settings = replace(settings, input_timing_cache=settings.output_timing_cache or settings.input_timing_cache)
        write_state(checkpoint_dir, config, rank, folder)
    record = PlanRecord(
        tensorrt_version=target.tensorrt.version_text,
        compute_capability="{}.{}".format(*target.capability),
        prefill_tokens=sizes.prefill_tokens,
        gather_context_logits=options.gather_context_logits,
        aliased=options.aliased_state,
        just_in_time=options.debug_plugins,
        stripped=options.plan.strip_plan,
        weight_streaming=options.plan.weight_streaming,
        scaled_matmul=options.scaled_matmul,
    )
    return recorded(replace(config, fingerprint=digest.hexdigest()), record, folder)


def unpacked_weights(checkpoint: CheckpointConfig, capability: tuple[int, int]) -> list[str]:
    """Names of the weights that the checkpoint keeps quantised and plans for this GPU cannot."""
    parameters = checkpoint.decoder.parameters(checkpoint.tp_size)
    return [
        name
        for name, packing in checkpoint.packings.items()
        if not stays_packed(packing, parameters[name].local_shape(checkpoint.tp_size)[-1], capability)
    ]


def write_state(checkpoint_dir: Path, config: EngineConfig, rank: int, folder: Path) -> None:
    """Write the few weights that a session needs besides the plans, where there are any."""
    if kept := state_weights(config, load_rank(checkpoint_dir, rank)):
        # Written here, because safetensors' own files can be read by their owner only.
        (folder / state_file(rank)).write_bytes(save({name: weight.contiguous() for name, weight in kept.items()}))


def recorded(config: EngineConfig, record: PlanRecord, folder: Path) -> EngineConfig:
    """The config with the record of the plans that ``folder`` holds, and their sizes."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    rank_bytes = tuple(files[engine_file(rank)] for rank in range(config.world_size))
    return replace(config, tensorrt=replace(record, files=files), rank_bytes=rank_bytes)
