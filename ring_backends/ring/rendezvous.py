"""How the ranks of a ring find each other and get their process group.

The world comes from the launcher's environment (:mod:`ring_backends.ring.launcher`), unless a process group exists
already. A ring always gets a process group of its own, so that its hops never queue behind a framework's collectives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.ring import nccl_settings
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.launcher import LOOPBACK, check_visible_gpus, complete_environment, local_world_size
from ring_backends.ring.members import Traffic
from ring_backends.ring.ring import Ring
from ring_backends.ring.store import call_with_timeout
from ring_backends.ring.topology import host_name
from ring_backends.ring.transfer import post_batch
from ring_backends.ring.watchdog import WATCHDOG
from ring_backends.schedule.layout import LayoutKind
from ring_backends.torch_internals import internal

START_TIMEOUT = timedelta(seconds=300)
"""How far apart ranks may start. Importing a framework takes long, and some ranks take longer than others."""

RING_GROUP_PREFIX = "ring_backends/"
"""The beginning of the description of every ring's process group."""

_NCCL_MARGIN = timedelta(hours=1)
"""How much longer than the ring the watchdog of torch waits for a hop. It counts from when the host posts the hop."""

_ABORT_TIMEOUT = 10.0
"""Seconds to wait until NCCL has closed a communicator. Its kernels end before that."""

_num_rings: Counter[tuple[int, ...]] = Counter()  # how many rings of each set of ranks this process has joined


def start_world(timeout: timedelta) -> int:
    """Initialise torch.distributed if the environment has several ranks; return the size of the world.

    Hops of CPU tensors use gloo. Hops of CUDA tensors use NCCL if every rank has a GPU of its own, else gloo.

    Raises:
        ValueError: the launcher's variables are incomplete (:mod:`ring_backends.ring.launcher`).
    """
    if not dist.is_initialized():
        if complete_environment() == 1:
            return 1
        num_gpus = torch.cuda.device_count()
        check_visible_gpus(num_gpus)
        backend = "gloo"
        if dist.is_nccl_available() and num_gpus >= local_world_size():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl"
        join_world(backend, max(timeout, START_TIMEOUT))
    return dist.get_world_size()


def join_world(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from the environment.

    If MASTER_ADDR is the loopback address, the store listens on the loopback interface only. By default torch's store
    listens on every interface of the machine, whatever MASTER_ADDR is.

    Unless the user chose, torch is told to write no dump of NCCL's operations after an error. A process that has
    written one ends, even after an error of a ring that it would survive. NCCL is told to order its operations.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {}
    if not launcher_has_store and host in LOOPBACK:
        rank, world_size, listener = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None
        if rank == 0:
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=2 * world_size).detach()
        store = TCPStore(host, port, world_size, rank == 0, timeout, master_listen_fd=listener)
        options = {"store": store, "rank": rank, "world_size": world_size}
    if "nccl" in backend:
        nccl_settings.order_launches()
    with nccl_settings.default_value(nccl_settings.DUMP):
        dist.init_process_group(backend, timeout=timeout, **options)


def start_world_of_one() -> None:
    """Initialise torch.distributed for this process alone. Some frameworks need a process group even for one rank."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def ring_ranks(
    ring_size: int | None,
    group: DeviceMesh | dist.ProcessGroup | None,
    world_size: int,
    order: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The global ranks of this rank's ring, in ring order.

    Args:
        order: the ranks of the world, in the order in which they are cut into rings. None is ascending order.

    Raises:
        ValueError: the ring does not divide the world, or ``ring_size`` and ``group`` disagree.
    """
    if group is None:
        size = world_size if ring_size is None else ring_size
        if world_size % size:
            raise ValueError(
                f"ring_size = {size}: must divide the {world_size} ranks of the world; start a multiple of "
                f"{size} ranks, or use another ring size."
            )
        order = range(world_size) if order is None else order
        first = order.index(dist.get_rank()) // size * size if world_size > 1 else 0
        return tuple(order[first : first + size])
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh with axes {group.mesh_dim_names}: pass the ring's axis alone, mesh['ring']."
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group = {group!r}: expected a ProcessGroup, a one-dimensional DeviceMesh, or None.")
    ranks = tuple(dist.get_process_group_ranks(group))
    if ring_size is not None and ring_size != len(ranks):
        raise ValueError(
            f"ring_size = {ring_size} and group has {len(ranks)} ranks: leave ring_size out, or pass a group of "
            f"{ring_size} ranks."
        )
    return ranks


def connect(
    ranks: Sequence[int],
    layout: LayoutKind,
    timeout: timedelta,
    adapter: str = "native",
    order: Sequence[int] | None = None,
) -> Ring:
    """Join the ring of these global ranks. Only these ranks make the call. A ring of one connects to nothing.

    Args:
        ranks: in ring order, with this process among them. The ring's process group has the same order.
        adapter: the adapter's name in the registry.
        order: the ranks of all rings, ring after ring, if the whole world was cut into rings; else None.

    Raises:
        RuntimeError: torch.distributed was initialized for neither CPU nor CUDA tensors, or its debug level is DETAIL.
    """
    ranks = tuple(ranks)
    data_size, data_rank = _place_among_rings(ranks, dist.get_world_size() if dist.is_initialized() else 1)
    if order is not None:
        data_size, data_rank = len(order) // len(ranks), order.index(ranks[0]) // len(ranks)
    ring = Ring(
        data_size=data_size,
        data_rank=data_rank,
        ranks=ranks,
        order=tuple(order or ()),
        layout_kind=layout,
        timeout=timeout,
        adapter=adapter,
    )
    if len(ranks) == 1:
        return ring
    _check_backends(dist.get_backend_config())
    _num_rings[ranks] += 1
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    name = f"{RING_GROUP_PREFIX}{'-'.join(map(str, ranks))}/{_num_rings[ranks]}"
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(name, world.get_group_store())
    store.set(f"host/{rank}", host_name())
    group = _new_group(ranks, store, name, max(timeout, START_TIMEOUT))
    hosts = tuple(host.decode() for host in store.multi_get([f"host/{other}" for other in range(size)]))
    connected = _open_connections(group, max(timeout, START_TIMEOUT))
    over_nccl = connected is not None
    group.set_timeout(timeout + _NCCL_MARGIN if over_nccl else timeout)
    has_error = partial(_nccl_has_error, group) if over_nccl else lambda: False
    agreement = Agreement(store, rank, size, timeout, partial(abort, group), has_error)
    WATCHDOG.add(agreement.waits)
    connection: dict[str, Any] = {"group": group, "agreement": agreement, "connected": connected}
    return replace(ring, size=size, rank=rank, hosts=hosts, **connection)


def _check_backends(config: str) -> None:
    """Refuse a world that sends neither CPU nor CUDA tensors, given as ``"device:backend,…"``."""
    if "cpu:" not in config and "cuda:" not in config:
        raise RuntimeError(
            f"torch.distributed was initialized with {config} alone: a ring sends tensors over gloo or NCCL, those of "
            "other accelerators through host memory; call torch.distributed.init_process_group"
            f'("cpu:gloo,{config}") before initialize().'
        )


_worlds: weakref.WeakKeyDictionary[Traffic, Ring] = weakref.WeakKeyDictionary()


def world_ring(ring: Ring) -> Ring:
    """A ring of all ranks of the world, for the comparisons and collectives of training on ``ring``.

    All ranks of the world make this call. It returns ``ring`` itself if that has all ranks. Otherwise it makes a ring
    at the first call, and returns the same one later.

    Raises:
        ValueError: data size × ring size is not the size of the world.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if ring.data_size * ring.size != world_size:
        raise ValueError(
            f"data size × ring size = {ring.data_size} × {ring.size}, but the world has {world_size} ranks: training "
            "uses all of them; cut the whole world into rings of one size."
        )
    if ring.size == world_size:
        return ring
    if ring.traffic not in _worlds:  # all layouts of a ring share its traffic
        _worlds[ring.traffic] = connect(range(world_size), "contiguous", ring.timeout, ring.adapter)
    return _worlds[ring.traffic]


def _new_group(ranks: tuple[int, ...], store: Store, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group of these ranks, in ring order, after all of them have arrived.

    Other ranks do not make this call. torch's public ``new_group`` would name the group by how many groups this process
    has made, and wait forever if the members have made different numbers of groups. It would also sort the ranks.

    Raises:
        RuntimeError: torch's debug level is DETAIL, with which this release of torch can end no hop.
    """
    nccl_settings.check_debug_level()
    make = internal(dist.distributed_c10d, "_new_process_group_helper", "a new ring")
    groups = internal(dist.distributed_c10d, "_world", "a new ring")
    if store.add("arrived", 1) == len(ranks):
        store.set("all arrived", "")
    store.wait(["all arrived"], timeout)
    world, rank = dist.group.WORLD, ranks.index(dist.get_rank())
    assert world is not None
    backend, world_store = groups.pg_map[world]
    group: dist.ProcessGroup
    options = {"timeout": timeout, "group_desc": name}
    over_nccl = "cuda:nccl" in dist.get_backend_config(world)
    if over_nccl:
        nccl_settings.order_launches()  # in vain if the program has used NCCL before
    # Unless the user chose, the watchdog of torch aborts a group after an error of NCCL, and does not end the process.
    with _unbound(world), nccl_settings.default_value(nccl_settings.ERROR_HANDLING):
        backend_options = _nccl_options(timeout) if over_nccl else None  # other backends in the group ignore them
        group, _ = make(len(ranks), rank, list(ranks), backend, world_store, name, backend_options, **options)
    group.bound_device_id = world.bound_device_id
    groups.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    return group


def _nccl_options(timeout: timedelta) -> object:
    """Options for a communicator whose kernels start before waiting kernels of other streams, such as tiles."""
    nccl: Any = internal(dist, "ProcessGroupNCCL", "a ring over NCCL")
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it is not that of the group
    return options


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Let torch make a new communicator for a group, if the world is bound to a device.

    Otherwise torch splits the world's communicator, which waits for all ranks of the world, lost ones too.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def _open_connections(group: dist.ProcessGroup, timeout: timedelta) -> set[tuple[int, int]] | None:
    """Make the connections of the group that need all ranks, before a hop in which some of them take no part.

    NCCL makes a group's communicator at the group's first operation, and all ranks must join that. Here it is one
    message from each rank to the next, which nearly all later hops use too. A collective would also connect the ranks
    as its algorithm needs them, and every connection takes memory of the GPU. A wait with a timeout blocks the host
    over NCCL too.

    Returns:
        The (source, destination) pairs with this rank that NCCL has connected; None without NCCL.
    """
    if "cpu:" in dist.get_backend_config(group):  # a barrier may go over NCCL, if the group is bound to a GPU
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
    device = _nccl_device(group)
    if device is None:
        return None
    rank, size = group.rank(), group.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    sent, received = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for work in post_batch(group, [(after, sent)], [(before, received)], tag=1):
        work.wait(timeout)
    return {(before, rank), (rank, after)}


def _nccl_device(group: dist.ProcessGroup) -> torch.device | None:
    """The GPU of this rank if the group sends CUDA tensors over NCCL; else None."""
    if "cuda:nccl" not in dist.get_backend_config(group):
        return None
    return gpu_of(group)


def gpu_of(group: dist.ProcessGroup) -> torch.device:
    """The GPU that ``init_process_group(device_id=…)`` bound the group to; without it, the current GPU."""
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def _nccl_has_error(group: dist.ProcessGroup) -> bool:
    """Whether the watchdog of torch has found an error of NCCL, such as the lost connection of a peer."""
    purpose = "a ring over NCCL"
    errors = internal(torch._C._distributed_c10d, "ErrorType", purpose)
    backend = internal(group, "_get_backend", purpose)(torch.device("cuda"))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL the backend is wrapped.
    backend = getattr(backend, "wrapped_pg", backend)
    return bool(backend.get_error() != errors.SUCCESS)


def abort(group: dist.ProcessGroup) -> None:
    """Close the group's connections, which ends the waits of other ranks for this one.

    gloo's own abort does nothing, but a wait that times out closes all connections of the group. Therefore this
    function waits briefly for a message with tag 0, which no rank is expected to send.

    NCCL's abort ends the group's kernels, so that their streams continue.
    """
    call_with_timeout(_ABORT_TIMEOUT, group.abort, default=None)
    if "gloo" in dist.get_backend_config(group):
        for peer in set(range(group.size())) - {group.rank()}:
            with contextlib.suppress(RuntimeError):  # the timeout, or the peer is gone already
                work = dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), group=group, group_src=peer, tag=0)
                assert work is not None
                work.wait(timedelta(milliseconds=1))


def _place_among_rings(ranks: tuple[int, ...], world_size: int) -> tuple[int, int]:
    """(data size, data rank) of a ring if rings of its shape cover the world; else (1, 0)."""
    size = len(ranks)
    stride = ranks[1] - ranks[0] if size > 1 else 1
    evenly_spaced = stride > 0 and all(rank == ranks[0] + index * stride for index, rank in enumerate(ranks))
    block = stride * size
    if not evenly_spaced or world_size % block or ranks[0] % block >= stride:
        return 1, 0
    return world_size // size, ranks[0] // block * stride + ranks[0] % stride
