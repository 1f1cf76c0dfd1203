"""From a TensorRT-LLM checkpoint to an engine folder."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trtllm_replayssm.builders.checkpoint import TOKENIZER_FILES, CheckpointConfig, rank_file
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.builders.staging import check_folders, check_space, own_config, staged_folder
from trtllm_replayssm.errors import CheckpointError, EngineError
from trtllm_replayssm.network.tensorrt.options import Report
from trtllm_replayssm.runtime.engine_config import DEFAULT_MAX_SEQ_LEN, BuildOptions, EngineConfig, engine_file
from trtllm_replayssm.runtime.files import check_writable
from trtllm_replayssm.runtime.rank_files import (
    NO_FINGERPRINT,
    RANK_FORMAT,
    check_tensors,
    data_bytes,
    stamp,
    write_rank,
)
from trtllm_replayssm.runtime.tensorrt.plans import Target, tensorrt_builds_here, this_machine, write_plans

log = logging.getLogger(__name__)

#: Called with the bytes written so far, the bytes to write, and the name of the file at hand.
Progress = Callable[[int, int, str], None]


def build_engine(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    options: BuildOptions | None = None,
    progress: Progress = lambda done, total, name: None,
    phases: Report = lambda phase, done, total: None,
    target: Target | None = None,
) -> EngineConfig:
    """Write an engine folder: config.json, ``rank{N}.engine`` and the tokenizer's files; returns what config.json says.

    The folder appears complete or not at all. An earlier engine in ``output_dir`` is replaced; anything else there is
    refused. Memory stays small: weights are copied piece by piece, or read by TensorRT from the checkpoint's files.

    progress: of copying, flavour embedded. phases: of TensorRT's builder. target: what TensorRT builds for; by default
    this machine.
    Raises CheckpointError for a checkpoint that is not complete and sound, EngineError or UserError for options that
    cannot work, a machine that cannot build, or an output folder that is in the way.
    """
    source, output, options = Path(checkpoint_dir), Path(output_dir), options or BuildOptions()
    config, files = read_checkpoint(source, options)
    check_folders(source, output, is_engine)
    check_space(output, sum(map(data_bytes, files)))
    if config.engine_flavour == "tensorrt":
        # Before a folder is made: most machines cannot.
        target = target or this_machine(options.aliased_state, options.debug_plugins)
        if options.plan.output_timing_cache is not None:
            check_writable(options.plan.output_timing_cache)
    elif unused := options.for_tensorrt():
        log.warning("--%s: of no use to the embedded engine that is built", ", --".join(unused))
    with staged_folder(output) as folder:
        if target is not None and config.engine_flavour == "tensorrt":
            config = write_plans(source, folder, config, options, target, phases)
        else:
            config = write_weights(files, folder, config, progress)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    return config


def decided(options: BuildOptions) -> BuildOptions:
    """The options with a definite flavour: auto is TensorRT where it can build."""
    if options.engine_flavour != "auto":
        return options
    return replace(options, engine_flavour="tensorrt" if tensorrt_builds_here() else "embedded")


def read_checkpoint(folder: Path, options: BuildOptions) -> tuple[EngineConfig, list[SafetensorsFile]]:
    """What the options mean for the checkpoint in ``folder``, and its checked rank files."""
    config = engine_config(CheckpointConfig.read(folder), options)
    return config, checked_files(folder, config.checkpoint)


def engine_config(checkpoint: CheckpointConfig, options: BuildOptions) -> EngineConfig:
    """What the options mean for this checkpoint; fingerprint and sizes are still open.

    Raises UserError or EngineError for options that do not fit together, or that the model does not allow.
    """
    trained = checkpoint.max_position_embeddings
    max_seq_len = options.max_seq_len or min(trained or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
    if trained is not None and max_seq_len > trained:
        log.warning("max_seq_len %d is more than the %d tokens the model was trained for", max_seq_len, trained)
    checkpoint = replace(checkpoint, replay=options.replay(checkpoint.replay))
    checkpoint.check_replay()
    flavour = decided(options).engine_flavour
    if flavour == "tensorrt" and checkpoint.replay.quantised_state:
        raise EngineError(
            f"TensorRT engines have no {checkpoint.replay.state_dtype} states", "build with --engine_flavour embedded"
        )
    scaled = any(packing.input_scale is not None for packing in checkpoint.packings.values())
    if options.scaled_matmul and flavour == "tensorrt" and not scaled:
        raise EngineError(
            "the checkpoint has no linear weights with a scale of their inputs, which --scaled_matmul needs",
            "convert a checkpoint that was calibrated for FP8 or NVFP4 inputs with --quantization keep",
        )
    return EngineConfig(
        checkpoint=checkpoint,
        max_batch_size=options.max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=options.max_num_tokens,
        engine_flavour=flavour,
    )


def checked_files(folder: Path, config: CheckpointConfig) -> list[SafetensorsFile]:
    """The rank files. Raises CheckpointError unless they are exactly those that config.json describes."""
    wanted, found = [rank_file(r) for r in range(config.tp_size)], {p.name for p in folder.glob("rank*.safetensors")}
    for name in wanted:
        if name not in found:
            raise CheckpointError(f"{folder} lacks {name}; its config.json asks for {len(wanted)} rank files")
    if surplus := sorted(found - set(wanted)):
        raise CheckpointError(
            f"{folder} holds {surplus[0]}, but its config.json says tp_size {config.tp_size}",
            "convert the Hugging Face folder again, into an empty folder",
        )
    files, layout = [SafetensorsFile(folder / name) for name in wanted], config.rank_layout()
    for file in files:
        check_tensors(file, layout)
    return files


def is_engine(folder: Path) -> bool:
    """Whether the folder holds an engine that this program, of whatever version, has built, and nothing else."""
    config = own_config(folder, r"rank\d+(\.mtp)?\.engine|rank\d+\.state\.safetensors")
    return config is not None and "build_config" in config and "replayssm" in config


def write_weights(files: list[SafetensorsFile], folder: Path, config: EngineConfig, progress: Progress) -> EngineConfig:
    """Write the weights of every rank into the empty ``folder``; returns the config with fingerprint and sizes."""
    total, done = sum(map(data_bytes, files)), 0
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    targets = [folder / engine_file(rank) for rank in range(config.world_size)]
    for rank, (file, target) in enumerate(zip(files, targets)):

        def advanced(count: int, name: str = target.name) -> None:
            nonlocal done
            done += count
            progress(done, total, name)

        metadata = {
            "format": RANK_FORMAT,
            "rank": str(rank),
            "world_size": str(config.world_size),
            "fingerprint": NO_FINGERPRINT,
        }
        digest.update(write_rank(file, target, metadata, advanced).encode())
    for target in targets:
        stamp(target, digest.hexdigest())
    sizes = tuple(target.stat().st_size for target in targets)
    return replace(config, fingerprint=digest.hexdigest(), rank_bytes=sizes)
