"""Tensors on their way to the host, while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class Arriving:
    """A copy of a tensor, made when the device comes to it: the host works on one step while the device computes the next."""

    def __init__(self, tensor: Tensor) -> None:
        """The tensor may be changed or dropped at once."""
        self.event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self.host = tensor.clone()
            return
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """The copy on the host, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.host
