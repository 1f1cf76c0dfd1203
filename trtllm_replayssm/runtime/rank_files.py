"""The files that hold one rank's weights: safetensors, checked against the decoder that will read them.

``rank{N}.engine`` holds the bytes of ``rank{N}.safetensors`` behind a header that says which build it belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from trtllm_replayssm.builders.safetensors_reader import READ_DTYPES, SafetensorsFile
from trtllm_replayssm.errors import CheckpointError

#: Value of ``format`` in the metadata of a rank file.
RANK_FORMAT = "trtllm-replayssm-engine"
#: Stands in the header while the fingerprint, which covers all files, is not known yet; has its length.
NO_FINGERPRINT = "0" * 64
COPY_BYTES = 16 << 20


def check_tensors(file: SafetensorsFile, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raises CheckpointError unless the file holds exactly the tensors of CheckpointConfig.rank_layout."""
    missing, surplus = sorted(layout.keys() - file.entries), sorted(file.entries.keys() - layout)
    if missing or surplus:
        what, names = ("lacks", missing) if missing else ("holds an unknown tensor,", surplus)
        raise CheckpointError(f"{file.path} {what} {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""))
    for name, (wanted, shape) in layout.items():
        entry = file.entries[name]
        if entry.shape != shape:
            raise CheckpointError(f"{file.path}: {name} has shape {list(entry.shape)}, expected {list(shape)}")
        if READ_DTYPES.get(entry.dtype) != wanted:
            expected = str(wanted).removeprefix("torch.")
            raise CheckpointError(f"{file.path}: {name} is {entry.dtype}, expected {expected}")


def data_bytes(file: SafetensorsFile) -> int:
    return sum(entry.nbytes for entry in file.entries.values())


def write_rank(source: SafetensorsFile, target: Path, metadata: dict[str, str], advanced: Callable[[int], None]) -> str:
    """Write ``target`` with the tensors of ``source`` and other metadata; returns the sha256 of the tensors in hex.

    advanced: called with the number of bytes after each piece. The data is copied piece by piece and never held whole.
    """
    data_start = min(entry.start for entry in source.entries.values())
    header: dict[str, object] = {"__metadata__": metadata}
    for name, entry in source.entries.items():
        offsets = (entry.start - data_start, entry.end - data_start)
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Blanks up to a multiple of 8 bytes: the data stays aligned when it is mapped into memory.
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(json.dumps(sorted(source.entries)).encode())
    with source.path.open("rb") as reader, target.open("xb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        reader.seek(data_start)
        while piece := reader.read(COPY_BYTES):
            digest.update(piece)
            writer.write(piece)
            advanced(len(piece))
    return digest.hexdigest()


def stamp(path: Path, fingerprint: str) -> None:
    """Put the fingerprint of the build in the place of NO_FINGERPRINT."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        at = file.read(length).index(NO_FINGERPRINT.encode())
        file.seek(8 + at)
        file.write(fingerprint.encode())
