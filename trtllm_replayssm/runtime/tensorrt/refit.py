"""Puts the weights of a checkpoint into an engine whose plans were built without them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.checkpoint import TOKENIZER_FILES, CheckpointConfig
from trtllm_replayssm.builders.staging import check_folders, staged_folder
from trtllm_replayssm.compat import TensorRT, collector_paused, load_tensorrt
from trtllm_replayssm.errors import CheckpointError, EngineError
from trtllm_replayssm.network.tensorrt.build import EmittedStep
from trtllm_replayssm.network.tensorrt.log import tensorrt_log
from trtllm_replayssm.network.tensorrt.recording import RecordedPlugins, recorded_network, recording_tensorrt
from trtllm_replayssm.runtime.build import is_engine
from trtllm_replayssm.runtime.devices import resolve_device
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.tensorrt.engine import check_files, check_machine, deserialised
from trtllm_replayssm.runtime.tensorrt.plans import Target, emitted_plans, recorded, write_state


def refit_engine(checkpoint_dir: Path, engine_dir: Path, output_dir: Path) -> EngineConfig:
    """Write an engine folder like ``engine_dir`` with the weights of ``checkpoint_dir``, whole or not at all.

    Raises EngineError when the engine was not built with ``--strip_plan`` or cannot be loaded on this machine, and
    CheckpointError for the checkpoint of another model.
    """
    config = EngineConfig.read(engine_dir)
    record = config.tensorrt
    if record is None or not record.stripped:
        raise EngineError(f"{engine_dir} has its weights", "refit takes engines built with --strip_plan")
    checkpoint = CheckpointConfig.read(checkpoint_dir)
    if not fits(replace(checkpoint, replay=config.replay), config.checkpoint, record.scaled_matmul):
        raise CheckpointError(f"{checkpoint_dir} is not of the model that {engine_dir} was built for")
    tensorrt = load_tensorrt(("tensorrt",))
    check_machine(engine_dir, record, tensorrt, resolve_device(None))
    check_files(engine_dir, record)
    check_folders(engine_dir, output_dir, is_engine)
    log = tensorrt_log(tensorrt.module)
    with collector_paused():
        runtime = tensorrt.module.Runtime(log)
    # The same network once more, for the names of its weights; nothing is built.
    recording = recording_tensorrt(tensorrt.features)
    target = Target(recording, record.capability, RecordedPlugins, lambda: (recorded_network(recording), None))
    with staged_folder(output_dir) as folder:
        for rank in range(config.world_size):
            for name, step, _ in emitted_plans(checkpoint_dir, config, rank, target, record.scaled_matmul):
                cuda_engine = deserialised(engine_dir / name, runtime, log)
                refit(tensorrt, cuda_engine, step, engine_dir / name)
                (folder / name).write_bytes(serialised(tensorrt, cuda_engine, engine_dir / name))
            write_state(checkpoint_dir, config, rank, folder)
        config = recorded(config, replace(record, stripped=False), folder)
        for name in TOKENIZER_FILES:
            if (engine_dir / name).is_file():
                shutil.copyfile(engine_dir / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    return config


def fits(checkpoint: CheckpointConfig, built: CheckpointConfig, scaled_matmul: bool) -> bool:
    """Whether the weights of one checkpoint fit plans of the other. Scales of inputs are layers' own where they count."""
    if scaled_matmul:
        return checkpoint == built
    mine, theirs = (
        replace(config, packings={name: replace(p, input_scale=None) for name, p in config.packings.items()})
        for config in (checkpoint, built)
    )
    return mine == theirs


def refit(tensorrt: TensorRT, cuda_engine: Any, step: EmittedStep, path: Path) -> None:
    """Give the plan its weights. Raises EngineError when its weights are not those of the network."""
    log, weights = tensorrt_log(tensorrt.module), step.emitter.named_weights
    with collector_paused():
        refitter = tensorrt.module.Refitter(cuda_engine, log)
    for name in refitter.get_all_weights():
        if name not in weights:
            raise EngineError(f"{path} wants weights {name}, which this version does not know")
        if not refitter.set_named_weights(name, tensorrt.weights(weights[name])):
            raise EngineError(f"{path} does not take the weights {name}: {log.first_error()}")
    if not refitter.refit_cuda_engine():
        raise EngineError(f"{path} cannot be given its weights: {log.first_error()}")


def serialised(tensorrt: TensorRT, cuda_engine: Any, path: Path) -> Any:
    """The plan with its weights. Raises EngineError when TensorRT does not give it."""
    serialization = cuda_engine.create_serialization_config()
    serialization.clear_flag(tensorrt.module.SerializationFlag.EXCLUDE_WEIGHTS)
    content = cuda_engine.serialize_with_config(serialization)
    if content is None:
        reason = tensorrt_log(tensorrt.module).first_error()
        raise EngineError(f"{path} cannot be written with its weights: {reason}")
    return content
