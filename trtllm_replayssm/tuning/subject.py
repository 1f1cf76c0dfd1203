"""The recurrent layers that are tuned: of an engine, of a checkpoint, or of a bare config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trtllm_replayssm.builders.checkpoint import CheckpointConfig, rank_file
from trtllm_replayssm.builders.layers.recurrent import Recurrent
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine_config import EngineConfig, engine_file
from trtllm_replayssm.tuning.layer import Attributes, log_decays, signature

#: Names of a recurrent layer's float32 weights, in the order of the plugins' contracts.
WEIGHTS = ("A_log", "dt_bias", "D")


@dataclass(frozen=True)
class LayerGroup:
    """Layers with equal recurrences, as one rank sees them. layer: the first. names: prefixes of their weights."""

    layer: Recurrent
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class TunedSubject:
    """checkpoint: the model. weights: file of rank 0's weights; None where there is none to be read."""

    checkpoint: CheckpointConfig
    weights: Path | None = None

    def groups(self) -> tuple[LayerGroup, ...]:
        """Raises UserError for a model without recurrent layers."""
        found = recurrent_groups(self.checkpoint)
        if not found:
            raise UserError(f"{self.checkpoint.hf_architecture} has no recurrent layers here, so nothing can be tuned")
        return found

    def own_weights(self, group: LayerGroup) -> tuple[Tensor, ...] | None:
        """float32 weights of the layer of the group that forgets the slowest, in which errors stay longest."""
        if self.weights is None:
            return None
        attributes = group.layer.attributes(ReplayConfig())
        names = WEIGHTS[: len(signature(attributes).weights)]
        with SafetensorsFile(self.weights) as file:
            layers = [tuple(file.read(f"{prefix}.{name}").float() for name in names) for prefix in group.names]
        return max(layers, key=lambda weights: float(log_decays(attributes, *weights[:2]).median()))


def recurrent_groups(checkpoint: CheckpointConfig) -> tuple[LayerGroup, ...]:
    """The recurrent layers of one rank, equal recurrences together, in the order of the model."""
    names: dict[Attributes, list[str]] = {}
    layers: dict[Attributes, Recurrent] = {}
    for name, layer in checkpoint.rank_decoder().named_parts():
        if isinstance(layer, Recurrent):
            attributes = layer.attributes(ReplayConfig())
            layers.setdefault(attributes, layer)
            names.setdefault(attributes, []).append(name)
    return tuple(LayerGroup(layers[attributes], tuple(found)) for attributes, found in names.items())


def engine_subject(folder: Path) -> tuple[TunedSubject, EngineConfig]:
    """Of an engine. Plans of TensorRT hold their weights where they cannot be read.

    Raises EngineError when the folder is no engine.
    """
    config = EngineConfig.read(folder)
    weights = folder / engine_file(0) if config.engine_flavour == "embedded" else None
    return TunedSubject(config.checkpoint, weights), config


def checkpoint_subject(folder: Path) -> TunedSubject:
    """Raises CheckpointError when the folder is no checkpoint."""
    return TunedSubject(CheckpointConfig.read(folder), folder / rank_file(0))
