"""Tokens on their way to the host, one step behind the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Copies small tensors to the host without stopping the device: what a call hands over, the next one gets.

    The host then works on the tokens of one step while the device computes the one behind it.
    """

    def __init__(self) -> None:
        self.under_way: tuple[Tensor, torch.cuda.Event | None] | None = None

    def exchange(self, tensor: Tensor) -> Tensor | None:
        """Start to copy ``tensor``; returns that of the call before on the host, None at the first call."""
        before = self.finish()
        if tensor.device.type != "cuda":
            self.under_way = tensor.clone(), None
            return before
        event = torch.cuda.Event()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event.record(torch.cuda.current_stream(tensor.device))
        self.under_way = host, event
        return before

    def finish(self) -> Tensor | None:
        """The last tensor handed over, once it has arrived; None where there is none."""
        if self.under_way is None:
            return None
        (host, event), self.under_way = self.under_way, None
        if event is not None:
            event.synchronize()
        return host
