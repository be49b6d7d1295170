"""``initialize`` of every adapter: check the options, start the world, choose the rings, join one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.cost.arrangement import AutoOptions, RingSize, arrange, check_arrangement, refuse_arrangement
from ring_backends.ring.rendezvous import connect, ring_ranks, start_world
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder, UlyssesSize, ranks_of_one_host
from ring_backends.schedule.checks import check_group_heads, check_group_size, check_integer
from ring_backends.schedule.layout import LayoutKind, SequenceLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

AnyInitialize = TypeVar("AnyInitialize", bound=Callable[..., Ring])


class Initialize(Protocol):
    """The ``initialize`` of an adapter."""

    def __call__(
        self,
        ring_size: RingSize = None,
        layout: LayoutKind = "contiguous",
        group: DeviceMesh | dist.ProcessGroup | None = None,
        timeout: timedelta | float = timedelta(seconds=300),
        *,
        ring_order: RingOrder = "rank",
        buffer_bytes: int | None = None,
        ulysses_size: UlyssesSize = 1,
        **auto: Unpack[AutoOptions],
    ) -> Ring: ...


def initializer(
    adapter: str,
    *,
    connect: Callable[..., Ring] = connect,
    own_group: Callable[[RingSize, RingOrder], dist.ProcessGroup | None] = lambda ring_size, ring_order: None,
) -> Initialize:
    """Make the ``initialize`` of an adapter, which calls :func:`join_ring`.

    Args:
        adapter, connect: as in :func:`join_ring`.
        own_group: called if ``group`` is not given. It returns the group that the framework uses as the ring, or None.
            Its docstring becomes part of the docstring of ``initialize``.
    """

    @show_auto_options
    def initialize(
        ring_size: RingSize = None,
        layout: LayoutKind = "contiguous",
        group: DeviceMesh | dist.ProcessGroup | None = None,
        timeout: timedelta | float = timedelta(seconds=300),
        *,
        ring_order: RingOrder = "rank",
        buffer_bytes: int | None = None,
        ulysses_size: UlyssesSize = 1,
        **auto: Unpack[AutoOptions],
    ) -> Ring:
        """Join a ring; every rank of the ring makes this call.

        For arguments and errors, see :func:`ring_backends.joining.join_ring`.
        """
        if group is None:
            group = own_group(ring_size, ring_order)
        options = ring_order, buffer_bytes, ulysses_size
        return join_ring(adapter, ring_size, layout, group, timeout, *options, auto, connect=connect)

    documented: tuple[object, ...] = (initialize, own_group)
    initialize.__doc__ = "\n\n".join(inspect.getdoc(function) or "" for function in documented).rstrip()
    return initialize


def show_auto_options(initialize: AnyInitialize) -> AnyInitialize:
    """Decorate an adapter's ``initialize``, so that ``help`` and ``inspect.signature`` list the options in ``**auto``.

    They are those of :class:`~ring_backends.AutoOptions`. The default ``...`` means that the option is left out.
    """
    signature = inspect.signature(initialize)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    hints = {name: getattr(hint, "__forward_arg__", hint) for name, hint in AutoOptions.__annotations__.items()}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
        for name, hint in hints.items()
    ]
    initialize.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return initialize


def as_timedelta(timeout: object) -> timedelta:
    """Return a timeout, which may be given in seconds.

    Raises:
        TypeError, ValueError: ``timeout`` is neither a number nor a timedelta, or not above 0, or not finite.
    """
    length = timeout
    if isinstance(length, int | float) and not isinstance(length, bool):
        try:
            length = timedelta(seconds=length)
        except (ValueError, OverflowError):
            raise ValueError(f"timeout = {timeout}: must be a finite number of seconds; 300 is usual.") from None
    if not isinstance(length, timedelta):
        raise TypeError(
            f"timeout = {timeout!r}: expected a number of seconds or a datetime.timedelta, such as 300 or "
            "timedelta(seconds=300)."
        )
    if length <= timedelta(0):
        raise ValueError(f"timeout = {timeout}: must be above 0, as hops take time; 300 seconds are usual.")
    return length


def check_options(
    ring_size: object,
    layout: Any,
    timeout: object,
    group: object,
    ring_order: object,
    buffer_bytes: object,
    ulysses_size: object,
    auto: Mapping[str, Any],
) -> None:
    """Check the options of ``initialize``, without communication.

    Raises:
        ValueError, TypeError: an argument is invalid, or two arguments contradict each other.
    """
    if ring_size not in (None, "auto"):
        SequenceLayout(1, ring_size)  # type: ignore[arg-type]
    SequenceLayout(1, 1, layout)
    as_timedelta(timeout)
    if buffer_bytes is not None:
        check_integer("buffer_bytes", buffer_bytes, 0, advice="leave it out to use the default of the device")
    if ulysses_size != "auto":
        size = check_integer("ulysses_size", ulysses_size, 1, advice="1 exchanges no heads")
        if isinstance(ring_size, int):
            check_group_size(size, ring_size)
        heads = auto.get("num_heads")
        if isinstance(heads, int):
            check_group_heads(size, heads)
    check_arrangement(ring_size, layout, ring_order, auto)
    if group is not None:
        refuse_arrangement("group already fixes the ring's ranks and their order", ring_size, ring_order)


def join_ring(
    adapter: str,
    ring_size: RingSize,
    layout: LayoutKind,
    group: DeviceMesh | dist.ProcessGroup | None,
    timeout: timedelta | float,
    ring_order: RingOrder,
    buffer_bytes: int | None,
    ulysses_size: UlyssesSize,
    auto: Mapping[str, Any],
    *,
    connect: Callable[..., Ring] = connect,
) -> Ring:
    """Join a ring. This is ``initialize`` of every adapter. Every rank of the ring makes the call.

    If torch.distributed is not initialized yet, the call initializes it from the launcher's environment: with gloo for
    CPU tensors, and with NCCL for CUDA tensors if every rank of the host has a GPU of its own. This GPU, number
    ``LOCAL_RANK``, then becomes the current device. Every rank of the world must make a call that initializes
    torch.distributed, and a call with ``"auto"`` or ``"topology"``. In a process that no launcher has started, the ring
    has one rank. Tensors stay where they are: move the model and this rank's rows to the GPU yourself.

    Args:
        adapter: the adapter's name in the registry.
        ring_size: number of ranks per ring. The world is cut into rings of neighbouring ranks. None makes one ring of
            the whole world. ``"auto"`` chooses among the sizes that divide the world: the smallest ring of several
            ranks that fits into their memory and is faster than one device. If there is none, it takes the smallest
            size that fits.
        layout: how a sequence is distributed over the ring, ``"contiguous"`` or ``"zigzag"``.
        group: an existing process group, or one axis of a DeviceMesh, whose ranks become the ring.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer, in seconds or as
            a timedelta. Start-up may take ``timeout`` or 300 s, whichever is longer.
        ring_order: the order in which the ranks are cut into rings. ``"rank"`` is ascending order. ``"topology"`` makes
            the ranks of one host neighbours. A host is identified by its name. The environment variable
            RING_BACKENDS_HOST overrides the name. ``"topology"`` is not allowed with ``group``.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors, which is about a tenth. The larger the buffers, the fewer hops and kernel launches a call takes.
            None is 512 MiB on accelerators and 8 MiB on CPUs. All ranks of a ring pass the same number.
        ulysses_size: u, a divisor of the ring size. Groups of u neighbouring ranks exchange rows for heads at the
            beginning and at the end of each call (Ulysses, arXiv 2309.14509), so that hops go between the groups only.
            It must divide the query heads of each call. ``ring_size`` still counts all ranks, and results and shards
            are those of u = 1. ``"auto"`` takes the largest u such that every group lies on one host, and then in each
            call the largest divisor of it that divides the heads. All ranks of a ring pass the same value.
        auto: options of ``initialize`` that describe the attention calls for ``ring_size="auto"``
            (:class:`~ring_backends.AutoOptions`): seq_len, segment_lengths, dilation_rates, num_heads, head_dim and
            more. All ranks of the world measure tiles and hops for a second or two, and rank 0 decides.
        connect: joins the ring of the given global ranks, for adapters whose rings need more than torch.distributed. It
            takes the arguments of :func:`~ring_backends.ring.rendezvous.connect` by position.

    Raises:
        ValueError, TypeError: an argument is invalid, or no ring fits into the memory.
        RingMismatchError: the ranks pass different options. Only ``"auto"`` and ``"topology"`` compare them.
        RingPeerError: a rank did not make the call in time.
    """
    check_options(ring_size, layout, timeout, group, ring_order, buffer_bytes, ulysses_size, auto)
    timeout = as_timedelta(timeout)
    world_size = start_world(timeout)
    size, order = arrange(ring_size, layout, world_size, ring_order, buffer_bytes, ulysses_size, auto)
    ranks = ring_ranks(size, group, world_size, order)
    if ulysses_size != "auto":
        check_group_size(ulysses_size, len(ranks))
    ring = connect(ranks, layout, timeout, adapter, order if group is None else None)
    if ulysses_size == "auto":
        return replace(ring, buffer_bytes=buffer_bytes, ulysses_size=ranks_of_one_host(ring.hosts), fits_heads=True)
    return replace(ring, buffer_bytes=buffer_bytes, ulysses_size=ulysses_size)
