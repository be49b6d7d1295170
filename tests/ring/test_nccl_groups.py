"""Process groups of rings over NCCL, made over gloo. No GPU runs here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.adapters import native
from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring import collectives, rendezvous, transfer
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.store import REFUSED, publish_configuration
from ring_backends.testing.world import on_every_rank

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


class Options:
    """In place of ProcessGroupNCCL.Options, which torch for the CPU does not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


@contextlib.contextmanager
def groups_of_nccl(made: list[dict[str, Any]]) -> Iterator[None]:
    """Let the world pass for one of gloo and NCCL that is bound to a GPU. ``made`` gets how torch makes groups."""
    make, world = dist.distributed_c10d._new_process_group_helper, dist.group.WORLD  # type: ignore[attr-defined]
    assert world is not None

    def recorded(*arguments: Any, **more: Any) -> Any:
        *others, options = arguments
        group = {"high priority": options.is_high_priority_stream, "timeouts": (options._timeout, more["timeout"])}
        group |= {"handling": os.environ.get(ERROR_HANDLING), "order": os.environ.get(LAUNCH_ORDER)}
        made.append(group | {"bound to": (world.bound_device_id, more.get("device_id"))})
        return make(*others, **more)

    world.bound_device_id = GPU
    with (
        mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", recorded),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
        mock.patch.object(rendezvous, "_nccl_device", return_value=CPU),
        mock.patch.object(transfer, "stream_device", return_value=CPU),
    ):
        yield
    assert world.bound_device_id == GPU
    world.bound_device_id = None


@pytest.mark.parametrize("chosen", [None, "3"])
@on_every_rank
def test_the_group_of_a_ring_over_nccl(chosen: str | None) -> None:
    """Hops have a high priority. Torch neither splits the world's communicator nor ends the process first."""
    timeout, made = timedelta(seconds=400), []
    changes = {} if chosen is None else {ERROR_HANDLING: chosen}
    with mock.patch.dict(os.environ, changes), groups_of_nccl(made):
        with mock.patch.object(dist.ProcessGroup, "set_timeout", mock.Mock()) as set_timeout:
            native.initialize(ring_size=4, timeout=timeout)
        assert os.environ.get(ERROR_HANDLING) == chosen
        assert os.environ.get(LAUNCH_ORDER) == "1"  # NCCL reads it at its first operation
    wanted = {"high priority": True, "timeouts": (timeout, timeout), "handling": chosen or "2", "order": "1"}
    assert made[0] == wanted | {"bound to": (None, None)}, made[0]
    watched = set_timeout.call_args.args[-1]  # by torch's watchdog
    assert watched > timeout + timedelta(minutes=30), watched


def test_errors_that_torch_found() -> None:
    errors = torch._C._distributed_c10d.ErrorType
    states = errors.SUCCESS, errors.COMM_ERROR, errors.TIMEOUT
    backends = [SimpleNamespace(get_error=lambda state=state: state) for state in states]
    groups = [SimpleNamespace(_get_backend=lambda device, x=x: x) for x in backends]
    wrapped = SimpleNamespace(wrapped_pg=backends[1])  # as with TORCH_DISTRIBUTED_DEBUG=DETAIL
    groups.append(SimpleNamespace(_get_backend=lambda device: wrapped))
    assert [rendezvous._nccl_has_error(group) for group in groups] == [False, True, True, True]


@on_every_rank
def test_the_first_operation_of_a_ring_over_nccl() -> None:
    """Every rank sends to the next one and makes no collective over NCCL, as a barrier of a bound group would be."""
    posted: list[Any] = []

    def post(operations: Any, post: Any = dist.batch_isend_irecv) -> Any:
        posted.extend(operations)
        return post(operations)

    forbidden = {name: mock.Mock(side_effect=AssertionError) for name in ("barrier", "broadcast", "all_gather")}
    with (
        mock.patch.multiple(dist, **forbidden, batch_isend_irecv=post),
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
        groups_of_nccl([]),
    ):
        ring = native.initialize(ring_size=4)
    before, after = (ring.rank - 1) % 4, (ring.rank + 1) % 4
    assert [(operation.op, operation.group_peer) for operation in posted] == [(dist.irecv, before), (dist.isend, after)]
    assert ring.connected == {(before, ring.rank), (ring.rank, after)}
    assert [call.args[0].device for call in all_reduce.call_args_list] == [CPU]
    with (
        groups_of_nccl([]),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),  # without gloo
        mock.patch.multiple(dist, **forbidden, all_reduce=forbidden["barrier"]),
    ):
        assert native.initialize(ring_size=4).connected == ring.connected
    assert native.initialize(ring_size=4).connected is None


@pytest.mark.parametrize(("bound", "used"), [(torch.device("cuda", 3), 3), (None, 0)])
def test_a_ring_uses_the_gpu_that_its_group_is_bound_to(bound: torch.device | None, used: int) -> None:
    """Without set_device, the current GPU is number 0 on every rank."""
    group: Any = SimpleNamespace(bound_device_id=bound)
    ring: Any = SimpleNamespace(group=group)
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        assert rendezvous._nccl_device(group) == collectives._device(ring) == torch.device("cuda", used)


CLOSED = {"failed/1": json.dumps({"calls": {}, "raised": "MemoryError: no room", REFUSED: {}}), "failed": "1"}
TEXT_OF_REFUSAL = "refused its arguments with TypeError: is_causal = 7"


@pytest.mark.parametrize(
    ("published", "error", "text"),
    [
        (CLOSED, RingPeerError, "rank 1 raised MemoryError: no room"),
        ({"check/1/1": json.dumps({REFUSED: TEXT_OF_REFUSAL}), REFUSED: "1/1"}, RingMismatchError, TEXT_OF_REFUSAL),
    ],
    ids=["closed", "refused"],
)
def test_aborted_collectives_raise_even_if_they_return(
    published: dict[str, str], error: type[Exception], text: str
) -> None:
    """Over NCCL an abort ends the kernels, and the host reads garbage without an error."""
    store = HashStore()
    agreement = Agreement(store, 0, 2, timedelta(seconds=8), mock.Mock())
    ring: Any = SimpleNamespace(agreement=agreement, rank=0, check_connected=lambda: None)
    publish_configuration(store, 1, 0, collectives._COMPARISON)

    with collectives.framework_collectives(ring, "step"):
        pass

    def step() -> None:
        with collectives.framework_collectives(ring, "step"):
            for key, value in published.items():
                store.set(key, value)
            for _ in range(2):
                agreement.waits.end_vain_wait()

    with mock.patch.object(collectives, "_abort_frameworks") as abort, pytest.raises(error, match=text):
        step()
    assert abort.call_count == 1
