"""A Hugging Face model folder: config.json, and tensors from one safetensors file or from indexed shards.

Quantised weights appear as the full-precision tensors that they stand for.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from trtllm_replayssm.builders.hf.config import read_config
from trtllm_replayssm.builders.hf.quantised import DEQUANTISED, QuantisedTensor, find_quantised
from trtllm_replayssm.builders.hf.refusals import refuse_layout
from trtllm_replayssm.builders.safetensors_reader import SafetensorsFile, TensorEntry, unique_keys
from trtllm_replayssm.builders.staging import real
from trtllm_replayssm.errors import CheckpointError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class HfFolder:
    """config: config.json as a dict. entries: dtype, shape and size of every tensor, from the files' headers alone.

    quantised: those of the entries that are dequantised when they are read. fate: what a note says becomes of them. refused:
    why a model cannot use an entry, for those that it may leave out.

    Raises CheckpointError, in one sentence that names the file and the tensor, for every folder that is not in order.
    ``warn`` is called for files that lie in the folder and are not used, and once for weights that are quantised.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = logger.warning, fate: str = DEQUANTISED) -> None:
        self.path, self.warn = path, warn
        if os.path.isfile(path):
            raise CheckpointError(
                f"{path} is a file", "--model_dir must be a folder with config.json and safetensors files"
            )
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{path} does not exist",
                "--model_dir must be a folder with a config.json; hf download NAME --local-dir FOLDER brings one from the hub",
            )
        refuse_layout(path)
        self.config = read_config(path / "config.json")
        single, index = path / SINGLE_FILE, path / INDEX_FILE
        if os.path.exists(single):
            self.files = [self.unindexed(index)]
        elif os.path.exists(index):
            self.files = self.indexed(index)
        elif any(path.glob("rank*.safetensors")) or any(path.glob("rank*.engine")):
            raise CheckpointError(
                f"{path} holds rank files: it is a TensorRT-LLM checkpoint or an engine, not a Hugging Face folder",
                "a checkpoint goes to build --checkpoint_dir, an engine to generate --engine_dir",
            )
        else:
            raise CheckpointError(
                f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}",
                "download the whole checkpoint; shards cannot be read without their index",
            )
        self.owners = {name: file for file in self.files for name in file.entries}
        stored = {name: file.entries[name] for name, file in self.owners.items()}
        found = find_quantised(path, self.config, stored, fate)
        self.quantised, self.refused = found.weights, found.refused
        self.entries: dict[str, TensorEntry | QuantisedTensor] = {
            **{name: entry for name, entry in stored.items() if name not in found.replaced},
            **found.weights,
        }
        self.refuse_mlx()
        self.warn_strays()
        for note in found.notes:
            warn(note)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor, read now and not kept; float32 where it is stored quantised.

        Raises CheckpointError for dtypes that hold no weights, unreadable files, and scales that contradict the values.
        """
        if name in self.quantised:
            return self.quantised[name].read(self.stored)
        return self.stored(name)

    def stored(self, name: str) -> Tensor:
        """One tensor as a file has it."""
        return self.owners[name].read(name)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- files -------------------------------------------------------------------------------------------------------

    def unindexed(self, index: Path) -> SafetensorsFile:
        """The one file. transformers prefers it to an index, so an index beside it describes another save."""
        if os.path.exists(index) and set(self.weight_map(index).values()) != {SINGLE_FILE}:
            self.warn(f"{index} describes other files than {SINGLE_FILE} and is ignored")
        return SafetensorsFile(self.inside(SINGLE_FILE))

    def indexed(self, index: Path) -> list[SafetensorsFile]:
        """The shards that the index names, which must hold exactly the tensors that it says."""
        weight_map = self.weight_map(index)
        shards = {shard: self.inside(shard) for shard in sorted(set(weight_map.values()))}
        missing = [shard for shard, path in shards.items() if not os.path.exists(path)]
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of {len(shards)} shards: {listed(missing)}", "download them again"
            )
        files = {shard: SafetensorsFile(path) for shard, path in shards.items()}
        owner: dict[str, str] = {}
        for shard, file in files.items():
            for name in file.entries:
                if name in owner:
                    raise CheckpointError(f"{self.path}: {name} is both in {owner[name]} and in {shard}")
                owner[name] = shard
        for name, shard in weight_map.items():
            if owner.get(name) != shard:
                raise CheckpointError(f"{index} says that {name} is in {shard}, but it is not", "download both again")
        unlisted = sorted(set(owner) - set(weight_map))
        if unlisted:
            raise CheckpointError(
                f"{index} does not list {len(unlisted)} tensors of the shards: {listed(unlisted)}",
                "download both again",
            )
        return list(files.values())

    def weight_map(self, index: Path) -> dict[str, str]:
        """Shard of every tensor. Raises CheckpointError when the index is damaged or names something else than a shard."""
        try:
            data = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        except OSError as error:
            raise CheckpointError(f"{index} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{index} cannot be read as JSON: {error}", "download it again") from None
        weight_map: Any = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map", "download it again")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{index} puts {name} into {shard!r}, which is not a safetensors file")
        return weight_map

    def inside(self, shard: str) -> Path:
        """The path of a shard, which must lie in the folder, or be a link into the cache that the folder belongs to."""
        if "/" in shard or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"{self.path / INDEX_FILE} names {shard!r}, which is not in the folder")
        path, root = self.path / shard, real(self.path)
        # The hub's cache keeps snapshots/REVISION/FILE as links to blobs/HASH of the same repository.
        homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
        if not any(real(path).is_relative_to(home) for home in homes):
            raise CheckpointError(
                f"{path} is a link that leaves the folder", "put the file itself into the folder, and convert again"
            )
        return path

    # ---- contents ----------------------------------------------------------------------------------------------------

    def refuse_mlx(self) -> None:
        """MLX keeps convolution weights as ``[C, K, 1]`` and folds norms: nothing in it can be taken at face value."""
        for file in self.files:
            if file.metadata.get("format") == "mlx":
                raise CheckpointError(f"{file.path} is in MLX format", "use the original checkpoint")
        for name, shape in self.shapes.items():
            if name.endswith("conv1d.weight") and len(shape) == 3 and shape[1] > 1 and shape[2] == 1:
                raise CheckpointError(
                    f"{self.path}: {name} has MLX layout {list(shape)}", "use the original checkpoint"
                )

    def warn_strays(self) -> None:
        """Files beside the indexed ones: leftovers of an older save, or tensors that the index forgot."""
        used = {file.path.name for file in self.files}
        for path in sorted(self.path.glob("*.safetensors")):
            if path.name not in used:
                self.warn(f"{path} is not part of the checkpoint and is not used{self.hint_unique(path)}")

    def hint_unique(self, path: Path) -> str:
        """Says so when an unused file holds tensors that the checkpoint lacks, as MTP layers in a file of their own."""
        try:
            names = SafetensorsFile(self.inside(path.name)).entries
        except CheckpointError:
            return ""
        extra = [name for name in names if name not in self.owners]
        return f"; it holds {len(extra)} tensors that are nowhere else: {listed(extra)}" if extra else ""


def listed(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
