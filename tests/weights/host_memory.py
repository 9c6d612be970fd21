"""Host memory of this process that stands in for GPU memory."""

from __future__ import annotations

import weakref

import torch


class HostMemory:
    """Allocator whose buffers are opened by number, also in another process. A buffer contains garbage until it is
    written, and again once the writer has freed it."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.buffers: list[torch.Tensor] = []
        self.num_held = 0
        self.num_open = 0  # tensors with which readers hold buffers
        self.num_waits = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if num_bytes > self.room:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes are too many")
        memory = torch.full((num_bytes,), 170, dtype=torch.uint8)
        writers = memory[:]
        weakref.finalize(writers, self._free, memory)
        self.buffers.append(memory)
        self.num_held += 1
        return writers

    def _free(self, memory: torch.Tensor) -> None:
        memory.fill_(170)
        self.num_held -= 1

    def export(self, buffer: torch.Tensor) -> int:
        (number,) = [n for n, memory in enumerate(self.buffers) if memory.data_ptr() == buffer.data_ptr()]
        return number

    def open(self, handle: int) -> torch.Tensor:
        opened = self.buffers[handle][:]
        self.num_open += 1
        weakref.finalize(opened, self._close)
        return opened

    def _close(self) -> None:
        self.num_open -= 1

    def synchronize(self) -> None:
        self.num_waits += 1
