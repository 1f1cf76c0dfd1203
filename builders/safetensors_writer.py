"""Writing a safetensors file whose tensors arrive one after the other, in any order, and in pieces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Name of a dtype in a safetensors header.
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
#: Elements that are converted and written at once: bounds the copy that a change of dtype makes.
BLOCK_ELEMENTS = 1 << 22


class SafetensorsWriter:
    """A file whose names, dtypes and shapes are known beforehand and whose bytes are not.

    The header is written first; each tensor then has its place. Wide dtypes come first, so that every tensor is aligned to
    its element size although the format allows no gaps.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """tensors: dtype and shape by name. Raises OSError when the file cannot be created."""
        self.dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
        self.places: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
            self.places[name], self.ends[name] = offset, end
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.data_start = 8 + len(encoded)
        self.file = path.open("xb")
        self.file.write(len(encoded).to_bytes(8, "little") + encoded)

    def append(self, name: str, tensor: Tensor) -> None:
        """The next rows of ``name``, converted to its dtype. Raises ValueError when they exceed its size."""
        dtype = self.dtypes[name]
        if self.places[name] + tensor.numel() * dtype.itemsize > self.ends[name]:
            raise ValueError(f"{name} is given more elements than its shape holds")
        self.file.seek(self.data_start + self.places[name])
        for block in tensor.contiguous().view(-1).split(BLOCK_ELEMENTS):
            self.file.write(block.to(dtype).view(torch.uint8).numpy().data)
        self.places[name] += tensor.numel() * dtype.itemsize

    def close(self) -> None:
        """Ends the file. Raises ValueError when a tensor is not complete."""
        self.file.close()
        for name, place in self.places.items():
            if place != self.ends[name]:
                raise ValueError(f"{name} is not complete: {self.ends[name] - place} bytes are missing")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.file.close()
