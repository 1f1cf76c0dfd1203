"""The networks of an engine without building it: what ``build --dry_run`` and ``--visualize_network`` show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.network.tensorrt.describe import ScopeRow, describe_network, describe_tensors
from trtllm_replayssm.network.tensorrt.visualise import to_onnx
from trtllm_replayssm.runtime.build import read_checkpoint
from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
from trtllm_replayssm.runtime.files import output_file
from trtllm_replayssm.runtime.tensorrt.models import step_sizes
from trtllm_replayssm.runtime.tensorrt.plans import Target, any_machine, emitted_plans

#: Who checked the network's layers and shapes, by flavour.
CHECKED_BY = {
    "tensorrt": "TensorRT {}",
    "tensorrt_rtx": "TensorRT-RTX {}, cut at the plugin layers",
    "recording": "this package; no TensorRT is installed",
}


@dataclass(frozen=True)
class Network:
    """One plan's network. checked_by: whose shape rules it went through. tensors: name, direction, dtype and shape."""

    file: str
    checked_by: str
    capability: tuple[int, int]
    rows: list[ScopeRow]
    tensors: list[tuple[str, str, str]]


@dataclass(frozen=True)
class DryRun:
    """What a build would make. profiles: least, usual and most value of every dynamic size, for each profile."""

    config: EngineConfig
    profiles: tuple[dict[str, tuple[int, int, int]], ...]
    networks: list[Network]


def dry_run(checkpoint_dir: Path, options: BuildOptions, target: Target | None = None) -> DryRun:
    """Emit the networks of rank 0; the others differ in their weights only. Needs no GPU and reads no weights.

    Raises the errors of ``build_engine`` for the checkpoint and the options, and UserError for the embedded flavour.
    """
    if options.engine_flavour == "embedded":
        raise UserError("an embedded engine has no network to show", "use --engine_flavour tensorrt")
    config, _ = read_checkpoint(checkpoint_dir, replace(options, engine_flavour="tensorrt"))
    target = target or any_machine()
    checked_by = CHECKED_BY[target.tensorrt.flavour].format(target.tensorrt.version_text)
    networks = [
        Network(name, checked_by, target.capability, describe_network(step), describe_tensors(step))
        for name, step, _ in emitted_plans(checkpoint_dir, config, 0, target, options.scaled_matmul)
    ]
    sizes = step_sizes(config, options.opt_num_tokens, options.gather_context_logits)
    return DryRun(config, sizes.profiles(), networks)


def visualise(
    checkpoint_dir: Path, options: BuildOptions, folder: Path, target: Target | None = None
) -> Iterator[Path]:
    """Write every plan's network of every rank into ``folder`` as ONNX, which is made if need be; yields the files.

    Raises UserError when the folder cannot be written, or the package onnx is not installed.
    """
    config, _ = read_checkpoint(checkpoint_dir, replace(options, engine_flavour="tensorrt"))
    target = target or any_machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}", "choose another folder") from None
    for rank in range(config.world_size):
        for name, step, _ in emitted_plans(checkpoint_dir, config, rank, target, options.scaled_matmul):
            path = folder / f"{Path(name).stem}.onnx"
            content = to_onnx(step, name)
            with output_file(path) as file:
                file.write(content)
            yield path
