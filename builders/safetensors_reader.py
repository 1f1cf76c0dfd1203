"""Reading one safetensors file: its header checked in full, its tensors one at a time.

Format: 8 bytes little-endian header length, a JSON header ``{name: {dtype, shape, data_offsets}}``, then the data, which
the tensors cover without gaps. Data is read, not mapped: memory stays at one tensor, and a file that shrinks under our
hands gives an error instead of a signal.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.errors import CheckpointError

#: Names of floating point dtypes in a safetensors header.
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Bits per element of every dtype that the format knows.
DTYPE_BITS = (
    {name: dtype.itemsize * 8 for name, dtype in FLOAT_DTYPES.items()}
    | {"BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
    | {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
)
#: dtypes in which tensors are read; scales that are powers of two come as the bytes that they are.
READ_DTYPES = FLOAT_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
#: The longest header that the reference implementation accepts.
MAX_HEADER_BYTES = 100_000_000
#: Most bytes of one read call; Linux reads less than 2 GiB at once.
READ_BYTES = 1 << 30


@dataclass(frozen=True)
class TensorEntry:
    """What the header says of one tensor. start, end: bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class SafetensorsFile:
    """The tensors of one file. Raises CheckpointError, naming file and tensor, for everything that is not in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor: int | None = None
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                prefix = file.read(8)
                length = int.from_bytes(prefix, "little")
                self.check_start(prefix, length, size)
                header = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self.metadata, self.entries = self.parse(header, 8 + length, size)

    def check_start(self, prefix: bytes, length: int, size: int) -> None:
        if prefix.startswith(b"GGUF"):
            raise CheckpointError(f"{self.path} is a GGUF file", "use the safetensors files of the original checkpoint")
        if prefix == b"version ":
            raise CheckpointError(
                f"{self.path} is a Git LFS pointer, not the file itself", "fetch the files with: git lfs pull"
            )
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path} is truncated or not a safetensors file: {size} bytes cannot hold its header",
                "download the file again",
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path} is not a safetensors file: its header would be {length} bytes long")

    def parse(self, header: bytes, data_start: int, size: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        """Metadata and entries; offsets are checked to cover the data exactly."""
        try:
            table = json.loads(header.decode("utf-8"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} has a header that cannot be read: {error}") from None
        if not isinstance(table, dict):
            raise CheckpointError(f"{self.path} has a header that is not a JSON object")
        metadata = table.pop("__metadata__", {})
        entries = {name: self.entry(name, described, data_start) for name, described in table.items()}
        expected = data_start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != expected:
                raise CheckpointError(f"{self.path}: {name} overlaps its neighbour or leaves a gap before it")
            expected = entry.end
        if expected > size:
            raise CheckpointError(
                f"{self.path} is truncated: its tensors need {expected} bytes, the file has {size}",
                "download the file again",
            )
        if expected < size:
            raise CheckpointError(f"{self.path} has {size - expected} bytes that belong to no tensor")
        return metadata if isinstance(metadata, dict) else {}, entries

    def entry(self, name: str, described: Any, data_start: int) -> TensorEntry:
        try:
            dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
            start, end = offsets
            integers = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        except (KeyError, TypeError, ValueError):
            integers = False
        if not integers:
            raise CheckpointError(f"{self.path} has a damaged header: the entry of {name} cannot be read")
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise CheckpointError(f"{self.path}: {name} has dtype {dtype!r}, which is not known")
        if math.prod(shape) == 0:
            raise CheckpointError(f"{self.path}: {name} is empty (shape {list(shape)})")
        if (end - start) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
            raise CheckpointError(
                f"{self.path}: {name} has {end - start} bytes, which does not fit {dtype} {list(shape)}"
            )
        return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)

    def read(self, name: str) -> Tensor:
        """One tensor, newly allocated. Raises CheckpointError when its dtype is none that weights are made from."""
        entry = self.entries[name]
        if entry.dtype not in READ_DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {entry.dtype}, which is not read")
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        try:
            if self.descriptor is None:
                self.descriptor = os.open(self.path, os.O_RDONLY)
            while done < entry.nbytes:
                got = os.preadv(self.descriptor, [view[done : done + READ_BYTES]], entry.start + done)
                if got == 0:
                    raise CheckpointError(f"{self.path} became shorter while {name} was read")
                done += got
        except OSError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error.strerror}") from None
        return buffer.view(READ_DTYPES[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ: the usual parser would keep the last and hide the first."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice} appears twice")
    return table
