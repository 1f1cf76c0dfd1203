"""The TensorRT-LLM checkpoint: a folder with config.json and one ``rank{N}.safetensors`` per rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import trtllm_replayssm
from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.layers.mla import Mla
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.builders.safetensors_writer import DTYPE_NAMES
from trtllm_replayssm.builders.typed import check_types, damage
from trtllm_replayssm.errors import CheckpointError, UserError
from trtllm_replayssm.network.packed import Packing, StoredWeight, assembled
from trtllm_replayssm.plugins import PLUGIN_VERSION
from trtllm_replayssm.replay import ReplayConfig

#: ``architecture`` in config.json: the name under which TensorRT-LLM finds the model class.
ARCHITECTURE = "ReplaySSMForCausalLM"
#: Version of the checkpoint's layout (names, shapes, config keys).
FORMAT_VERSION = 1
#: dtypes that a checkpoint's activations and weights may have.
MODEL_DTYPES = ("float32", "bfloat16", "float16")
#: Files of a Hugging Face folder that text input and output need; they travel through checkpoint and engine folder.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class CheckpointConfig:
    """What config.json of a checkpoint says.

    hf_architecture: ``architectures[0]`` of the source. dtype: of activations and of weights not kept in float32.
    eos_token_ids: ids that end a text. num_tokens: ids at or above it are padding rows of the embedding and are never
    sampled; None when the source does not tell. max_position_embeddings: as trained, None when the source does not tell.
    packings: how the weights that stay quantised are stored, by name.
    """

    hf_architecture: str
    dtype: str
    tp_size: int
    decoder: HybridDecoder
    replay: ReplayConfig
    eos_token_ids: tuple[int, ...] = ()
    num_tokens: int | None = None
    max_position_embeddings: int | None = None
    packings: dict[str, Packing] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def rank_decoder(self) -> HybridDecoder:
        """The decoder as one rank sees it."""
        return self.decoder.divided(self.tp_size)

    def check_replay(self) -> None:
        """Raises UserError for options of ReplaySSM that a layer's sizes do not allow."""
        for _, layer in self.decoder.named_parts():
            layer.pools(StateOptions(self.replay, self.torch_dtype, max_seq_len=1))

    def rank_layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of every tensor in one rank's file, by name."""
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, parameter in self.decoder.parameters(self.tp_size).items():
            shape = parameter.local_shape(self.tp_size)
            if name in self.packings:
                layout |= self.packings[name].layout(name, shape)
            else:
                layout[name] = (torch.float32 if parameter.float32 else self.torch_dtype, shape)
        return layout

    def quant_algo(self) -> str | None:
        """The quantisation as TensorRT-LLM names it; None where no weight is quantised."""
        algorithms = {packing.quant_algo for packing in self.packings.values()}
        return "MIXED_PRECISION" if len(algorithms) > 1 else next(iter(algorithms), None)

    def check_packings(self) -> None:
        """Raises ValueError for quantised weights that the decoder does not have, or that are no matrices."""
        parameters = self.decoder.parameters(self.tp_size)
        for name, packing in self.packings.items():
            check_types(packing)
            if name not in parameters or parameters[name].float32 or len(parameters[name].shape) < 2:
                raise ValueError(f"{name} cannot be quantised")

    def to_dict(self) -> dict[str, Any]:
        """config.json: TensorRT-LLM's usual keys, and everything of ours under ``replayssm``."""
        decoder = self.decoder
        attention = next((a for _, a in decoder.named_parts() if isinstance(a, Attention | Mla)), None)
        return {
            "architecture": ARCHITECTURE,
            "dtype": self.dtype,
            "logits_dtype": "float32",
            "vocab_size": decoder.vocab_size,
            "hidden_size": decoder.hidden_size,
            "num_hidden_layers": len(decoder.layers),
            "num_attention_heads": attention.num_heads if attention else 0,
            "num_key_value_heads": attention.num_kv_heads if isinstance(attention, Attention) else 1,
            "head_size": attention.head_dim if isinstance(attention, Attention) else None,
            "norm_epsilon": decoder.norm_epsilon,
            "max_position_embeddings": self.max_position_embeddings,
            "position_embedding_type": "learned_absolute",
            "use_parallel_embedding": False,
            "mapping": {"world_size": self.tp_size, "tp_size": self.tp_size, "pp_size": 1},
            "quantization": {"quant_algo": self.quant_algo(), "kv_cache_quant_algo": None},
            "producer": {"name": "trtllm_replayssm", "version": trtllm_replayssm.__version__},
            "replayssm": {
                "format_version": FORMAT_VERSION,
                "plugin_version": PLUGIN_VERSION,
                "hf_architecture": self.hf_architecture,
                "eos_token_ids": list(self.eos_token_ids),
                "num_tokens": self.num_tokens,
                "replay": self.replay.to_dict(),
                "decoder": decoder.to_dict(),
                **(
                    {"packings": {name: asdict(packing) for name, packing in self.packings.items()}}
                    if self.packings
                    else {}
                ),
            },
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> CheckpointConfig:
        """The config that ``to_dict`` wrote. Raises CheckpointError when it is another program's or another version's."""
        ours = data.get("replayssm")
        if data.get("architecture") != ARCHITECTURE or not isinstance(ours, dict):
            raise CheckpointError(
                f"{where} is not a checkpoint of trtllm-replayssm",
                "make one from a Hugging Face folder with: trtllm-replayssm convert",
            )
        if ours.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has checkpoint format {ours.get('format_version')}, this version reads {FORMAT_VERSION}",
                "convert the Hugging Face folder again",
            )
        try:
            config = cls(
                hf_architecture=ours["hf_architecture"],
                dtype=data["dtype"],
                tp_size=data["mapping"]["tp_size"],
                decoder=HybridDecoder.from_dict(ours["decoder"]),
                replay=ReplayConfig(**ours["replay"]),
                eos_token_ids=tuple(ours["eos_token_ids"]),
                num_tokens=ours["num_tokens"],
                max_position_embeddings=data["max_position_embeddings"],
                packings={name: Packing(**packing) for name, packing in ours.get("packings", {}).items()},
            )
            # Values that no checkpoint can have show up here rather than while an engine is built.
            check_types(config)
            if config.dtype not in MODEL_DTYPES or config.tp_size < 1:
                raise ValueError(f"dtype {config.dtype}, tp_size {config.tp_size}")
            config.rank_decoder()
            config.check_packings()
            if any(size < 1 for _, shape in config.rank_layout().values() for size in shape):
                raise ValueError("a weight would be empty")
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, UserError) as error:
            raise damaged(f"{where} is damaged: {damage(error)}") from None
        return config

    @classmethod
    def read(cls, folder: Path) -> CheckpointConfig:
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist", "--checkpoint_dir must be a folder written by trtllm-replayssm convert"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} does not hold a JSON object")
        return cls.from_dict(data, str(path))


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def load_rank(folder: Path, rank: int) -> dict[str, StoredWeight]:
    """The weights of one rank by name, mapped from the file: nothing is read before it is used.

    Raises CheckpointError when the folder's files are not exactly those of its config.json, or when a tensor is missing,
    surplus, or of another dtype or shape than the config asks for.
    """
    config = CheckpointConfig.read(folder)
    if not 0 <= rank < config.tp_size:
        raise CheckpointError(f"{folder} has no rank {rank}: its tp_size is {config.tp_size}")
    expected, found = {rank_file(r) for r in range(config.tp_size)}, {p.name for p in folder.glob("rank*.safetensors")}
    if found != expected:
        problem = "lacks " if expected - found else "holds, beyond what its config.json names, "
        raise damaged(f"{folder} {problem}{', '.join(sorted(expected - found or found - expected))}")
    path = folder / rank_file(rank)
    entries = SafetensorsFile(path).entries
    layout = config.rank_layout()
    for name in sorted(layout.keys() ^ entries.keys()):
        raise damaged(f"{path} {'lacks' if name in layout else 'holds an unknown tensor,'} {name}")
    for name, (dtype, shape) in layout.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (DTYPE_NAMES[dtype], shape):
            raise damaged(
                f"{path}: {name} is {entry.dtype} {list(entry.shape)}, but config.json asks for"
                f" {DTYPE_NAMES[dtype]} {list(shape)}"
            )
    return assembled(load_file(path), config.packings, config.torch_dtype)


def damaged(problem: str) -> CheckpointError:
    return CheckpointError(problem, "convert the Hugging Face folder again")
