"""The FairScale adapter passes the shared suites. Its transport carries all hops. Its rings are FairScale's groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from command_line import check_alone, environment
from fairscale_cases import ADAPTER, CASE

from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.rings import FOUR, TWO, RingSpec, backend, ring_of
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.suite import EVERY_ADAPTER, AdapterTests
from ring_backends.testing.world import World, on_every_rank

Message = tuple[int, int, int, int]
"""Source, destination, bytes and tag."""


def carried_messages(rings: RingSpec, case: AttentionCase) -> tuple[list[Message], list[Message], int]:
    """The messages that the transport sends and receives, and the message count of the ring.

    Before the call, each rank has created a different number of messages.
    """
    from fairscale.nn.pipe.messages import Transport
    from fairscale.nn.pipe.types import PipeMessage

    from ring_backends.adapters.fairscale import RingTransport

    assert issubclass(RingTransport, Transport)
    for _ in range(dist.get_rank()):
        PipeMessage(0, 0, 0, tensors=(torch.zeros(1),))
    ring = ring_of(ADAPTER, rings)
    call = local_call(ADAPTER, ring, case)

    def watched(name: str) -> Any:
        return mock.patch.object(RingTransport, name, autospec=True, side_effect=getattr(RingTransport, name))

    def messages(watch: mock.Mock) -> list[Message]:
        carried = [made.args[1] for made in watch.call_args_list]
        return [(message.src, message.dest, message.tensors[0].nbytes, message.tag) for message in carried]

    ring.traffic.reset()
    with watched("send_message") as sends, watched("recv_message_tensors") as receives:
        call.gradients(call())
    return messages(sends), messages(receives), ring.traffic.messages


@contextlib.contextmanager
def model_parallel(*args: int, **kwargs: int) -> Iterator[Any]:
    """``fairscale.nn.model_parallel``, initialised."""
    from fairscale.nn.model_parallel import initialize

    with contextlib.redirect_stdout(None):
        initialize.initialize_model_parallel(*args, **kwargs)
    try:
        yield initialize
    finally:
        initialize.destroy_model_parallel()


class TestFairScale(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    quick = EVERY_ADAPTER
    without = MappingProxyType({"copies of a wrapped model": "ShardedDataParallel holds a process group"})

    @pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
    @pytest.mark.parametrize("rings", [FOUR, TWO], ids=str)
    def test_every_hop_is_carried_by_the_transport(self, world: World, rings: RingSpec, is_causal: bool) -> None:
        """The transport carries the messages of the ring between global ranks. Both ends use the same tag."""
        by_rank = world.run(carried_messages, rings, replace(CASE, is_causal=is_causal))
        sent, received = set(), set()
        for rank, (mine, arrived, counted) in enumerate(by_rank):
            assert len(mine) == counted
            assert all(source == rank for source, *_ in mine)
            sent |= {*mine}
            received |= {*arrived}
        assert sent == received
        assert len(sent) == sum(counted for *_, counted in by_rank) > 0

    @on_every_rank
    def test_the_ring_is_the_group_of_fairscale(self) -> None:
        initialize, rank = backend(ADAPTER).initialize, dist.get_rank()
        every, pair, apart = (0, 1, 2, 3), ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        assert initialize().ranks == every
        with model_parallel(1, pipeline_length=2):
            for ring in (initialize(), initialize(2)):
                assert ring.ranks == pair, ring
            assert initialize(group=dist.new_group(every)).ranks == every
        with model_parallel(2, pipeline_length=2):
            assert initialize().ranks == apart

    @on_every_rank
    def test_another_arrangement_than_fairscale_has_is_refused(self) -> None:
        needs = {"seq_len": 16, "segment_lengths": [16], "dilation_rates": [1], "num_heads": 2, "head_dim": 4}
        initialize, reason = backend(ADAPTER).initialize, ": fairscale.nn.model_parallel"
        with model_parallel(1, pipeline_length=2):
            ending(initialize, 4).check(ValueError, "ring_size = 4", "2 ranks")
            ending(initialize, ring_order="topology").check(ValueError, f"ring_order = 'topology'{reason}")
            ending(initialize, "auto", **needs).check(ValueError, f"ring_size = 'auto'{reason}")

    @on_every_rank
    def test_a_model_split_by_fairscale_is_refused(self) -> None:
        ring = self.ring()
        for layers, text in ((2, "2 ranks per layer"), (1, "2 pipeline stages")):
            with model_parallel(layers, pipeline_length=2):
                ending(self.parallelize, ring=ring).check(ValueError, text)


@THOROUGH
def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    warnings_as_errors = environment(PYTHONWARNINGS="error::DeprecationWarning")
    check_alone(tmp_path, "fairscale", {}, environment=warnings_as_errors)
