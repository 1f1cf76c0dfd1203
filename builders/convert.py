"""``convert``: a Hugging Face folder becomes a TensorRT-LLM checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trtllm_replayssm.builders.accounting import account
from trtllm_replayssm.builders.checkpoint import ARCHITECTURE, TOKENIZER_FILES, CheckpointConfig, rank_file
from trtllm_replayssm.builders.families.base import Family, Source
from trtllm_replayssm.builders.families.registry import architectures, find_family
from trtllm_replayssm.builders.gates import with_gates_apart
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.hf.metadata import (
    compare_state_dtype,
    eos_token_ids,
    max_position_embeddings,
    model_dtype,
    num_tokens,
)
from trtllm_replayssm.builders.hf.quantised import DEQUANTISED, KEPT
from trtllm_replayssm.builders.keeping import QUANTIZATIONS, Quantization, kept_packings, kept_parts, rank_parts
from trtllm_replayssm.builders.parallel import Parameter
from trtllm_replayssm.builders.safetensors_writer import SafetensorsWriter
from trtllm_replayssm.builders.staging import check_folders, check_space, own_config, staged_folder
from trtllm_replayssm.errors import CheckpointError, UserError
from trtllm_replayssm.replay import ReplayConfig

logger = logging.getLogger(__name__)

#: Called after each read with bytes read so far, bytes to read, and the name of the weight being written.
Progress = Callable[[int, int, str], None]


def convert(
    model_dir: str | Path,
    output_dir: str | Path,
    dtype: str = "auto",
    tp_size: int = 1,
    replay: ReplayConfig | None = None,
    progress: Progress = lambda done, total, name: None,
    warn: Callable[[str], None] = logger.warning,
    quantization: Quantization = "dequantise",
) -> CheckpointConfig:
    """Writes the checkpoint of ``model_dir`` to ``output_dir`` and returns its config.

    dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the model's own; weights that a layer keeps in float32
    stay so. tp_size: ranks of the tensor-parallel group. An earlier checkpoint at ``output_dir`` is replaced once the new
    one is complete; on any failure it stays as it was. Quantised weights are dequantised in float32 and rounded once; with
    quantization ``keep``, those of linear layers and experts in FP8 or NVFP4 stay as they are where that is exact. Peak
    memory is about the largest tensor (in float32, where it is quantised) and one rank's part of it.

    Raises UserError, naming file and tensor, when the folder cannot be converted or the output cannot be written.
    """
    if quantization not in QUANTIZATIONS:
        raise UserError(f"quantization is {quantization!r}", f"it is {' or '.join(QUANTIZATIONS)}")
    source_dir, target = Path(model_dir), Path(output_dir)
    check_folders(source_dir, target, is_checkpoint)
    with HfFolder(source_dir, warn, KEPT if quantization == "keep" else DEQUANTISED) as folder:
        family = find_family(folder.config, folder.shapes)
        for note in family.notes:
            warn(note)
        replay = replay or ReplayConfig()
        return convert_family(folder, family, target, dtype, tp_size, replay, progress, warn, quantization)


def convert_family(
    folder: HfFolder,
    family: Family,
    output_dir: Path,
    dtype: str,
    tp_size: int,
    replay: ReplayConfig,
    progress: Progress,
    warn: Callable[[str], None],
    quantization: Quantization = "dequantise",
) -> CheckpointConfig:
    """``convert`` for a folder that is open and a family that is known."""
    decoder = family.decoder()
    config = CheckpointConfig(
        hf_architecture=next(iter(architectures(folder.config)), type(family).architectures[0]),
        dtype=model_dtype(folder, dtype),
        tp_size=tp_size,
        decoder=decoder,
        replay=replay,
        eos_token_ids=eos_token_ids(folder, decoder.vocab_size, warn),
        num_tokens=num_tokens(folder, decoder.vocab_size, warn),
        max_position_embeddings=max_position_embeddings(folder),
    )
    # Refuses a tp_size that would tear heads or groups apart.
    config.rank_decoder()
    config.check_replay()
    compare_state_dtype(folder, replay.state_dtype, warn)
    sources = account(folder, family, decoder, warn)
    if quantization == "keep":
        decoder, sources = with_gates_apart(folder, decoder, sources)
        packings = kept_packings(folder, sources, decoder.parameters(tp_size), tp_size, warn)
        config = replace(config, decoder=decoder, packings=packings)
    layout = config.rank_layout()
    check_space(output_dir, tp_size * sum(math.prod(shape) * kind.itemsize for kind, shape in layout.values()))
    with staged_folder(output_dir) as staging:
        write_ranks(folder, staging, config, sources, progress)
        for name in TOKENIZER_FILES:
            if (folder.path / name).is_file():
                shutil.copyfile(folder.path / name, staging / name)
        (staging / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    return config


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a checkpoint of ours and nothing else, so that replacing it loses nothing."""
    config = own_config(folder, r"rank\d+\.safetensors")
    return config is not None and config.get("architecture") == ARCHITECTURE


def write_ranks(
    folder: HfFolder, staging: Path, config: CheckpointConfig, sources: dict[str, Source], progress: Progress
) -> None:
    """Every weight, made from its tensors and cut for every rank."""
    tp_size, layout = config.tp_size, config.rank_layout()
    parameters = config.decoder.parameters(tp_size)
    total = sum(folder.entries[tensor].nbytes for name in parameters for tensor in sources[name].names)
    done = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(SafetensorsWriter(staging / rank_file(rank), layout)) for rank in range(tp_size)]
        for name, parameter in parameters.items():
            source = sources[name]
            for run in source.runs():
                write_run(folder, writers, config, name, parameter, source, run)
                done += sum(folder.entries[tensor].nbytes for tensor in run)
                progress(done, total, name)


def write_run(
    folder: HfFolder,
    writers: list[SafetensorsWriter],
    config: CheckpointConfig,
    name: str,
    parameter: Parameter,
    source: Source,
    run: tuple[str, ...],
) -> None:
    """One run of a source into the files of all ranks. Its tensors are gone before the next run is read."""
    piece, ranks = parameter_of_run(parameter, source), len(writers)
    if name not in config.packings:
        made = padded(source.build(list(read_run(folder, run, name, parameter, writers[0].dtypes[name]))), piece.shape)
        for rank, writer in enumerate(writers):
            writer.append(name, piece.shard(made, rank, ranks))
        return

    def check(tensor_name: str, values: Tensor) -> None:
        check_values(tensor_name, values, parameter, config.torch_dtype)

    packing = config.packings[name]
    parts = kept_parts(folder, run, source, check)
    whole = tuple(padded(part, piece.shape, value) for part, value in zip(parts, packing.padding, strict=True))
    layout = packing.layout(name, piece.shape)
    for rank, writer in enumerate(writers):
        shares = rank_parts(piece, packing, whole, rank, ranks)
        for (part, (dtype, _)), share in zip(layout.items(), shares, strict=True):
            writer.append(part, share.contiguous().view(dtype))


def parameter_of_run(parameter: Parameter, source: Source) -> Parameter:
    """The parameter, or one index of its first axis when the source is stacked."""
    if not source.stacked:
        return parameter
    axis = None if parameter.axis is None else parameter.axis - 1
    return replace(parameter, shape=parameter.shape[1:], axis=axis)


def read_run(
    folder: HfFolder, run: tuple[str, ...], name: str, parameter: Parameter, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The tensors of one run, their values checked."""
    for tensor_name in run:
        tensor = folder.tensor(tensor_name)
        check_values(tensor_name, tensor, parameter, dtype)
        if name.endswith(".A_log") and math.isinf(tensor.double().exp().to(torch.float32).max().item()):
            raise CheckpointError(f"{tensor_name} holds values whose exponential is not finite", "the file is damaged")
        yield tensor


def check_values(name: str, tensor: Tensor, parameter: Parameter, dtype: torch.dtype) -> None:
    """Raises CheckpointError for NaN, infinity, an all-zero weight, and values that ``dtype`` cannot hold."""
    # One pass and no temporaries; NaN shows up in both ends.
    low, high = (end.item() for end in torch.aminmax(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        kind = "NaN" if math.isnan(low) else "infinite values"
        raise CheckpointError(f"{name} holds {kind}", "the file is damaged, or training had diverged")
    if parameter.nonzero and low == high == 0:
        raise CheckpointError(f"{name} is all zeros", "the file was written before its weights were filled in")
    largest = max(-low, high)
    if largest > torch.finfo(dtype).max:
        short = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} holds {largest:.3g}, which {short} cannot represent", "convert with --dtype bfloat16"
        )


def padded(tensor: Tensor, shape: tuple[int, ...], value: int = 0) -> Tensor:
    """The tensor with rows of one value behind it, where ranks need a vocabulary that they can share evenly."""
    missing = shape[0] - tensor.shape[0] if tensor.dim() else 0
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing else tensor
