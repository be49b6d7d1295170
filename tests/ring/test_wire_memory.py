"""The memory that a ring on a GPU keeps for its wire buffers. No GPU runs here."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_backends.ring import transfer
from ring_backends.ring.ring import Ring
from ring_backends.ring.wire_memory import ALIGNMENT, NUM_CALLS, NUM_STREAMS, BlockMemory, CallMemory, WireMemory

CPU = torch.device("cpu")


@pytest.fixture
def streams() -> Iterator[mock.Mock]:
    """Let tensors pass for those on a GPU. The ``return_value`` is the current stream."""
    with (
        mock.patch.object(transfer, "stream_device", return_value=CPU),
        mock.patch.object(torch.cuda, "current_stream", return_value="first") as current,
    ):
        yield current


def memory_of(kept: WireMemory) -> BlockMemory:
    memory = kept.of_call(torch.empty(0))
    assert isinstance(memory, BlockMemory)
    return memory


def call(kept: WireMemory, sizes: list[int]) -> list[Tensor]:
    """A call that takes buffers of these sizes, and gives them back in the end."""
    memory = memory_of(kept)
    buffers = [memory.take(size) for size in sizes]
    memory.give_back(*buffers)
    memory.end()
    return buffers


def test_without_a_gpu_every_buffer_is_allocated() -> None:
    for device in ("cpu", "meta"):
        memory = WireMemory().of_call(torch.empty(0, device=device))
        assert type(memory) is CallMemory
        assert memory.take(8).device.type == device
    assert CallMemory(CPU).take(8, zeroed=True).tolist() == [0] * 8


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("seed", range(8))
def test_buffers_share_no_bytes(seed: int) -> None:
    """Until they are given back. When a call is repeated, all lie in one block, which no gap makes longer."""
    kept, places = WireMemory(), []
    for repetition in range(3):
        memory, draw, taken = memory_of(kept), random.Random(seed), {}
        most = 0
        for value in range(200):
            if taken and draw.random() < 0.5:
                given = draw.choice([*taken])
                memory.give_back(taken.pop(given))
            else:
                size = draw.choice([0, 1, ALIGNMENT, draw.randrange(5000)])
                taken[value] = memory.take(size).fill_(value)
                assert len(taken[value]) == size
            for written, buffer in taken.items():
                assert (buffer == written).all()
            most = max(most, sum(-(-len(buffer) // ALIGNMENT) for buffer in taken.values()))
            places.append((repetition, [buffer.data_ptr() for buffer in taken.values() if len(buffer)]))
        memory.give_back(*taken.values())
        memory.end()
    (block,) = kept._blocks.values()
    assert most * ALIGNMENT <= len(block.memory) <= 2 * most * ALIGNMENT
    second, third = ([pointers for number, pointers in places if number == wanted] for wanted in (1, 2))
    assert second == third
    start = block.memory.data_ptr()
    assert all(0 <= pointer - start < len(block.memory) for pointers in third for pointer in pointers)
    assert all((pointer - start) % ALIGNMENT == 0 for pointers in third for pointer in pointers)


@pytest.mark.usefixtures("streams")
def test_a_buffer_is_zeroed_each_time() -> None:
    kept = WireMemory()
    for _ in range(3):
        memory = memory_of(kept)
        buffer = memory.take(100, zeroed=True)
        assert not buffer.any()
        memory.give_back(buffer.fill_(7))
        memory.end()


@pytest.mark.usefixtures("streams")
def test_no_call_gets_the_memory_of_one_that_has_not_ended() -> None:
    """Such as one that has raised an error while a hop was posted."""
    kept = WireMemory()
    for _ in range(2):
        call(kept, [1000])
    failed = memory_of(kept).take(1000).fill_(1)
    for _ in range(3):
        call(kept, [1000])[0].fill_(2)
    assert (failed == 1).all()


@pytest.mark.usefixtures("streams")
def test_memory_is_allocated_for_the_first_buffer() -> None:
    """Before that, an error of the allocator would not be reported to the other ranks."""
    kept = WireMemory()
    call(kept, [1000])
    with mock.patch.object(torch, "empty", side_effect=torch.OutOfMemoryError("no memory")):
        memory = kept.of_call(mock.Mock(device=CPU))
        with pytest.raises(torch.OutOfMemoryError):
            memory.take(1000)


@pytest.mark.usefixtures("streams")
def test_memory_that_later_calls_do_not_need_is_freed() -> None:
    kept = WireMemory()
    call(kept, [10_000, 10_000])
    for calls in range(NUM_CALLS + 1):
        call(kept, [600])
        (block,) = kept._blocks.values()
        assert len(block.memory) == (2 * 10_240 if calls < NUM_CALLS else 1024), calls


def test_each_stream_has_its_own_memory(streams: mock.Mock) -> None:
    kept, pointers = WireMemory(), {}
    for name in ("first", "second", "first", "second"):
        streams.return_value = name
        (buffer,) = call(kept, [1000])
        pointers[name] = buffer.data_ptr()
    assert len({*pointers.values()}) == 2
    streams.return_value = "third"
    call(kept, [1000])
    assert [*kept._blocks] == ["second", "third"]
    assert len(kept._blocks) == NUM_STREAMS


@pytest.mark.usefixtures("streams")
def test_training_may_follow_inference() -> None:
    """Torch refuses to write to a tensor that was made in inference mode."""
    kept = WireMemory()
    with torch.inference_mode():
        for _ in range(2):
            call(kept, [1000])
    (buffer,) = call(kept, [1000])
    assert buffer.fill_(1).all()


@pytest.mark.usefixtures("streams")
def test_all_layouts_of_a_ring_share_its_memory() -> None:
    ring = Ring()
    call(ring.wire_memory, [1000])
    assert ring.with_layout("zigzag").wire_memory is ring.wire_memory
    copy: Any = pickle.loads(pickle.dumps(ring))
    assert not copy.wire_memory._blocks
