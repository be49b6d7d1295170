"""The memory of wire buffers. On a GPU, a ring keeps it from call to call.

torch's NCCL backend calls ``record_stream`` for every tensor that it sends or receives, so the allocator reuses the
memory of a freed buffer only when NCCL's stream has come to the place where it was freed. If each hop allocated its
buffers, a host that runs ahead of the GPU would therefore hold those of several calls. Instead, a call *takes* its
buffers from one block of memory, and *gives them back*:

- what it sends, after the ``wait`` of the hop;
- what it receives, after the last tile or addition that reads it.

Later buffers may use the memory at once, in the order of the current CUDA stream. This needs no event: a post makes
NCCL's stream wait for the current stream, and ``wait`` makes the current stream wait for NCCL's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ring_backends.ring import transfer

ALIGNMENT = 512
"""Every buffer starts at a multiple of this many bytes in its block, as every tensor of CUDA's allocator does."""

NUM_CALLS = 256
"""A block has as many bytes as any of the last NUM_CALLS forwards and backwards needed."""

NUM_STREAMS = 2
"""A ring keeps the blocks of this many streams: those on which its latest calls were made."""


class CallMemory:
    """The memory of the wire buffers of one forward or backward. Here, torch allocates every buffer and frees it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, size: int, *, zeroed: bool = False) -> Tensor:
        """A buffer, uint8 [size], for the caller alone until :meth:`give_back`."""
        allocate = torch.zeros if zeroed else torch.empty
        return allocate(size, dtype=torch.uint8, device=self.device)

    def give_back(self, *buffers: Tensor) -> None:
        """Let later buffers overwrite these, in the order of the current stream. No hop may still use them."""

    def end(self) -> None:
        """Called after the call, unless it has raised an error. Its hops may still use the memory then."""


@dataclass
class Block:
    """The memory of the calls on one CUDA stream.

    Attributes:
        memory: uint8.
        needs: the bytes that each of the last forwards and backwards needed.
    """

    memory: Tensor | None = None
    needs: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_CALLS))

    def memory_of_next_call(self, device: torch.device) -> Tensor:
        size = max(self.needs, default=0)
        if self.memory is None or len(self.memory) != size:
            self.memory = None  # free it first
            with torch.inference_mode(False):  # an inference tensor could not be written to by calls outside of it
                self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self.memory


class BlockMemory(CallMemory):
    """Puts the buffers of one call into the block of the current stream, each into the first gap that is wide enough.

    A buffer beyond the end of the block is allocated, and the next call has a larger block.

    Args:
        blocks: those of the ring, by CUDA stream. The call removes its own, and puts it back when it ends. So no other
            call has it meanwhile or after an error.
    """

    def __init__(self, blocks: dict[Any, Block], device: torch.device) -> None:
        super().__init__(device)
        self._blocks, self._stream = blocks, torch.cuda.current_stream(device)
        self._block = blocks.pop(self._stream, Block())
        self._memory: Tensor | None = None
        self._need, self._places = 0, dict[Tensor, range]()

    def take(self, size: int, *, zeroed: bool = False) -> Tensor:
        if self._memory is None:
            self._memory = self._block.memory_of_next_call(self.device)
        start, padded = 0, -(-size // ALIGNMENT) * ALIGNMENT
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - start >= padded:
                break
            start = max(start, place.stop)
        stop = start + padded
        self._need = max(self._need, stop)
        if stop > len(self._memory):
            buffer = super().take(size, zeroed=zeroed)
        else:
            buffer = self._memory[start : start + size]
            if zeroed:
                buffer.zero_()
        self._places[buffer] = range(start, stop)
        return buffer

    def give_back(self, *buffers: Tensor) -> None:
        for buffer in buffers:
            del self._places[buffer]

    def end(self) -> None:
        assert not self._places, "every buffer is given back"
        self._block.needs.append(self._need)
        self._blocks[self._stream] = self._block
        for stream in [*self._blocks][:-NUM_STREAMS]:
            self._blocks.pop(stream, None)  # another thread may have removed it


class WireMemory:
    """The blocks of one ring. They live as long as the ring."""

    def __init__(self) -> None:
        self._blocks: dict[Any, Block] = {}

    def of_call(self, like: Tensor) -> CallMemory:
        """The memory of a forward or backward on the device of ``like``, in the order of the current stream."""
        device = transfer.stream_device([like])
        return CallMemory(like.device) if device is None else BlockMemory(self._blocks, device)
