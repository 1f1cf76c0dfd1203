"""Small integers on their way to the device, without the host waiting for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

#: int32 words of the smallest buffer: most of what is sent fits.
SMALLEST = 1024


class Staging:
    """Sends int32 tensors to a device, several in one copy.

    On a GPU they pass through pinned buffers, each of which is used again when its copy has ended: there are as many as
    copies were ever under way at the same time. On a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: Buffers and the events that their last copies end with, the oldest first.
        self.used: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, *tensors: Tensor) -> list[Tensor]:
        """The int32 host tensors on the device."""
        if self.device.type != "cuda":
            return list(tensors)
        sizes = [tensor.numel() for tensor in tensors]
        on_device = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        self.send_into(on_device, *tensors)
        return [part.view(tensor.shape) for part, tensor in zip(on_device.split(sizes), tensors)]

    def send_into(self, target: Tensor, *tensors: Tensor) -> None:
        """Fill ``target``, int32 ``[n]`` on the GPU, with the tensors one behind the other."""
        buffer, event = self.buffer(target.numel())
        torch.cat([tensor.flatten() for tensor in tensors], out=buffer)
        target.copy_(buffer, non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))

    def buffer(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """A pinned buffer that no copy reads, and the event that its next copy ends with."""
        if self.used and self.used[0][1].query():
            buffer, event = self.used.popleft()
        else:
            buffer, event = torch.empty(0, dtype=torch.int32), torch.cuda.Event()
        if buffer.numel() < size:
            buffer = torch.empty(max(size, SMALLEST), dtype=torch.int32, pin_memory=True)
        self.used.append((buffer, event))
        return buffer[:size], event
