"""The batches of a Hugging Face model are compared between the ranks of a ring, without a message per batch."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from native_ranks import world_of
from torch import Tensor
from trainer_cases import make_model

from ring_backends.adapters import native
from ring_backends.errors import RingMismatchError
from ring_backends.integrations.transformers import whole_batches
from ring_backends.integrations.transformers.whole_batches import ComparedBatches, use_ring
from ring_backends.ring.describe import checksum
from ring_backends.testing.failing_calls import AT_ONCE, Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.world import World

PRELOAD = ("transformers", "ring_backends.integrations.transformers.whole_batches")
two = world_of(2)


def call_with_batches(length: int, is_first: bool) -> tuple[int, Ended]:
    """Call a model with batches that differ in the last token or in their length; unless they are the first, after four
    calls with equal batches.

    Returns:
        The number of comparisons in the last three calls with equal batches, and how the last call ended.
    """
    rank, model = dist.get_rank(), make_model("llama")
    ring = native.initialize(timeout=timedelta(seconds=60))
    use_ring(model, ring)
    tokens = torch.arange(1, 9).view(1, -1)
    if not is_first:
        model(tokens, labels=tokens)
    with mock.patch.object(whole_batches, "agree") as agree:
        for shift in range(0 if is_first else 3):
            model(tokens + shift, labels=tokens)
    other = torch.arange(1, 1 + (length if rank else 8)).view(1, -1)
    other[0, -1] += rank
    return agree.call_count, ending(lambda: model(other, labels=other))


@pytest.mark.parametrize("length", matrix_but(9, of=(8, 9)))
@pytest.mark.parametrize("is_first", matrix_but(True, of=(False, True)))
def test_batches_that_differ_are_reported(two: World, length: int, is_first: bool) -> None:
    start = "the ranks differ in " if is_first else ""
    texts = (f"{start}input_ids (rank 0: torch.int64 [1, 8]", f", rank 1: torch.int64 [1, {length}]", "labels (rank 0")
    for num_comparisons, ended in two.run(call_with_batches, length, is_first):
        assert num_comparisons == 0
        ended.check(RingMismatchError, *texts, within=AT_ONCE)


def test_checksums_on_a_gpu_are_compared_two_batches_later() -> None:
    ring: Any = SimpleNamespace(agreement=SimpleNamespace(context={}))
    batches, contexts = ComparedBatches(ring), []
    batches.is_first = False
    events: list[Any] = []

    def pinned(like: Tensor, *, device: str, pin_memory: bool) -> Tensor:
        assert (device, pin_memory) == ("cpu", True)
        return torch.zeros((), dtype=like.dtype)

    def new_event() -> Any:
        events.append(mock.Mock())
        return events[-1]

    with (
        mock.patch.object(whole_batches, "is_on_gpu", lambda value: isinstance(value, Tensor)),
        mock.patch.object(torch, "empty_like", pinned),
        mock.patch.object(torch.cuda, "Event", new_event),
    ):
        for token in range(4):
            batches.compare({"input_ids": torch.full((1, 8), token), "use_cache": False}, {})
            contexts.append(dict(ring.agreement.context))
    of_first, of_second = (int(checksum(torch.full((1, 8), token))) for token in range(2))
    shape = {"use_cache": "False", "input_ids": "torch.int64 [1, 8]"}
    assert contexts[:2] == [shape] * 2
    assert contexts[2] == {**shape, "input_ids, 2 batches before": f"checksum {of_first}"}
    assert contexts[3] == {**shape, "input_ids, 2 batches before": f"checksum {of_second}"}
    assert [event.synchronize.call_count for event in events] == [1, 1, 0, 0]


def test_a_checksum_depends_on_every_element_and_on_their_order() -> None:
    x = torch.arange(6).view(2, 3)
    others = [x.flip(0), x.flip(1), x + torch.eye(2, 3, dtype=torch.int64)]
    assert len({int(checksum(tensor)) for tensor in (x, *others)}) == 4
    assert torch.equal(x, torch.arange(6).view(2, 3))
    assert int(checksum(x > 2)) != int(checksum(x > 3))
