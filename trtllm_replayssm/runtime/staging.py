"""Small integers on their way to the device, without the host waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

#: Copies that may be under way before the host reuses their buffer.
DEPTH = 8


class Staging:
    """Sends int32 tensors to a device, several in one copy.

    On a GPU they pass through pinned buffers, each of which is reused once its copy has ended; on a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[Tensor] = []
        self.events: list[torch.cuda.Event] = []
        self.turn = 0

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
        if len(self.buffers) < DEPTH:
            self.buffers.append(torch.empty(max(size, 1024), dtype=torch.int32, pin_memory=True))
            self.events.append(torch.cuda.Event())
        self.turn = (self.turn + 1) % len(self.buffers)
        self.events[self.turn].synchronize()
        if self.buffers[self.turn].numel() < size:
            self.buffers[self.turn] = torch.empty(size, dtype=torch.int32, pin_memory=True)
        return self.buffers[self.turn][:size], self.events[self.turn]
