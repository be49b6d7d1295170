"""Collectives of a ring outside of attention, with the ring's timeout and its errors.

All ranks of the ring make each of these calls. If they make different calls, all ranks raise RingMismatchError. If a
rank does not make the call in time, the others raise RingPeerError. Messages go point to point, because gloo's own
collectives end the process if ranks disagree on a size.

A framework's own collectives need the same calls on all ranks. :func:`agree_if_new` comes before them. It communicates
only if this rank leaves the usual sequence of calls. Then the other ranks may already wait in the framework's
collective. :func:`framework_collectives` ends that wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring import transfer
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import NOTHING, Call, Configuration, grace
from ring_backends.ring.members import flat_bytes
from ring_backends.ring.rendezvous import RING_GROUP_PREFIX, abort, gpu_of
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal

FILE_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for a rank that reads or writes files. A rank that dies or raises is noticed much sooner."""

_EXPECTED, _OTHER = "=", "!"
"""The first character of an error's text: whether the error has the expected class."""

_BROKEN_CONNECTION = ("gloo/transport/", "ncclRemoteError")
"""Texts in errors of gloo and NCCL that only a lost or late peer causes."""

_NUMBERS = 8
_COMPARISON = Configuration({"order of calls": "a comparison"})

Result = TypeVar("Result")


def agree(
    ring: Ring,
    name: str,
    fields: Mapping[str, object] | None = None,
    numbers: Sequence[float] = (),
    timeout: timedelta | None = None,
    values: Mapping[str, object] = NOTHING,
) -> list[list[float]]:
    """Make sure that all ranks make this call with the same ``fields``, and all-gather ``numbers``, which may differ.

    Args:
        name: name of the operation, for error messages.
        fields: JSON-serializable values.
        numbers: at most seven, exact up to 2⁵³.
        timeout: the timeout of this call; None takes the ring's.
        values: further fields, which usually change each time.

    Returns:
        The numbers of every rank, by ring rank.

    Raises:
        RingMismatchError: on every rank, naming each field that differs and every rank's value.
        RingPeerError: a rank did not make the call in time.
    """
    ring.check_connected()
    if ring.agreement is None:
        return [[float(number) for number in numbers]]
    _is_expected(ring.agreement, event_of(name, {}), values)  # without the fields, which may be others in each call
    return _compare(ring, event_of(name, fields or {}), values, numbers, timeout)


def agree_if_new(ring: Ring, event: Configuration, values: Mapping[str, object] = NOTHING) -> None:
    """Make sure that all ranks make this call, without communication if it is the usual one.

    It is the usual one if it came next at the same place the last time. Otherwise this function compares as
    :func:`agree` does. A rank that makes the usual call meanwhile learns of it in its next wait.

    Args:
        event: what :func:`event_of` returns.
        values: as in :func:`agree`. If the call is the usual one, the next comparison contains them.

    Raises:
        RingMismatchError, RingPeerError: as in :func:`agree`.
    """
    ring.check_connected()
    if ring.agreement is None:
        return
    if _is_expected(ring.agreement, event, values):
        ring.agreement.begin(_COMPARISON, details={**event.fields, **values})
    else:
        _compare(ring, event, values, (), None)


def event_of(name: str, fields: Mapping[str, object]) -> Configuration:
    """The call ``name`` with fields that must be equal on all ranks, as JSON-serializable values by name."""
    return Configuration({"order of calls": name, **fields})


def _is_expected(agreement: Agreement, event: Configuration, values: Mapping[str, object]) -> bool:
    return agreement.events.is_expected(event, {**values, **agreement.context}, agreement.num_calls)


def _compare(
    ring: Ring,
    event: Configuration,
    values: Mapping[str, object],
    numbers: Sequence[float],
    timeout: timedelta | None,
) -> list[list[float]]:
    agreement = ring.agreement
    assert agreement is not None
    digest = float(agreement.events.summary(event))
    # One size and one tag for all comparisons, so that ranks that compare different things still receive a row.
    row = [digest, *map(float, numbers), *[0.0] * (_NUMBERS - 1 - len(numbers))]
    fields = {**event.fields, **values}
    call = agreement.begin(_COMPARISON, details=fields, timeout=timeout)
    gathered = _all_gather(ring, call, torch.tensor(row, dtype=torch.float64, device="cpu")).tolist()
    if any(row[0] != digest for row in gathered):
        raise_difference(agreement, fields)
    return [row[1 : 1 + len(numbers)] for row in gathered]


def raise_difference(agreement: Agreement, fields: Mapping[str, object]) -> NoReturn:
    """Find the fields in which the ranks differ, in this event or in the values of earlier ones.

    All ranks make this call after they have found that they differ.

    Raises:
        RingMismatchError: on every rank, naming each field that differs and every rank's value.
    """
    earlier = Configuration(agreement.events.values())
    # A field of the call hides one of the context with the same name, and keeps its place in the message.
    agreement.begin(Configuration({**fields, **agreement.context, **fields}), check_again=True)
    agreement.begin(earlier, check_again=True)
    error = RingMismatchError(
        "the ranks differ in a call too long ago to name it. Every rank must make the same calls in the same order "
        "with the same arguments."
    )
    agreement.forget(error)
    raise error


def gather_texts(
    ring: Ring, name: str, text: str, timeout: timedelta | None = None, limit: int | None = 2000
) -> list[str]:
    """All-gather a text: the text of every rank, by ring rank.

    Args:
        name, timeout: as in :func:`agree`.
        limit: number of characters after which a text is cut off.

    Raises:
        RingMismatchError, RingPeerError: a rank makes another call, or does not come in time.
    """
    mine = text[:limit].encode()
    lengths = [int(length) for (length,) in agree(ring, name, None, [len(mine)], timeout)]
    if ring.size == 1 or not any(lengths):
        return [text] * ring.size
    padded = torch.frombuffer(bytearray(mine.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    call = _begin(ring, f"texts of {name}", timeout)
    assert call is not None
    gathered = _all_gather(ring, call, padded)
    return [bytes(row[:length].tolist()).decode() for row, length in zip(gathered, lengths, strict=True)]


def all_reduce(ring: Ring, name: str, tensor: Tensor) -> Tensor:
    """Return the sum over the ranks, added in fp32 or fp64, with the same bits on every rank.

    Raises:
        RingMismatchError, RingPeerError: a rank makes another call, or does not come in time.
    """
    call = _begin(ring, name, dtype=str(tensor.dtype), shape=[*tensor.shape])
    if call is None:
        return tensor
    parts = tensor.detach().contiguous().view(-1).tensor_split(ring.size)
    own = ring.reduce_scatter(call, parts.__getitem__, 0).to(tensor.dtype)
    sums = dict(ring.parts_of_ranks(call, own, [len(part) for part in parts], 1))
    return torch.cat([sums[rank] for rank in range(ring.size)]).view(tensor.shape)


def broadcast(ring: Ring, name: str, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Copy the values of ring rank ``source`` into the tensors of the others. Shapes and dtypes are equal on all ranks.

    Raises:
        RingMismatchError, RingPeerError: a rank makes another call, or does not come in time.
    """
    tensors = [_without_repetition(tensor.detach()) for tensor in tensors]
    shapes = [f"{tensor.dtype} {[*tensor.shape]}" for tensor in tensors]
    call = _begin(ring, name, tensors=shapes, source=source)
    if call is None or not tensors:
        return
    parts = [flat_bytes(tensor.contiguous()) for tensor in tensors]
    buffer = torch.cat(parts).to(_device(ring))
    place, distance = (ring.rank - source) % ring.size, 1
    while distance < ring.size:  # each round doubles the number of ranks that have the values
        if place < distance and place + distance < ring.size:
            ring.exchange(call, {(ring.rank + distance) % ring.size: buffer}, {}, distance)
        elif distance <= place < 2 * distance:
            ring.exchange(call, {}, {(ring.rank - distance) % ring.size: buffer}, distance)
        distance *= 2
    if place > 0:
        for tensor, part in zip(tensors, buffer.split([part.numel() for part in parts]), strict=True):
            # Clone for alignment: an offset within the buffer may not be a multiple of the dtype's size.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


@contextlib.contextmanager
def framework_collectives(
    ring: Ring, name: str, inside: Ring | None = None, *, reports_errors: bool = True
) -> Iterator[None]:
    """Wraps a framework's own collectives, such as a backward that reduces gradients.

    If one rank raises an error inside, the ring is closed, and the other ranks stop waiting for that rank. They also
    stop if this rank has made no call on a ring for the ring's timeout.

    Args:
        inside: the ring of the attention that is called inside.
        reports_errors: False if other errors may occur on all ranks, which then continue.

    Raises:
        RingMismatchError: another rank made another call.
        RingPeerError: another rank raised an error inside, or is gone.
    """
    ring.check_connected()
    if ring.agreement is None:
        yield
        return
    inner = None if inside is None else inside.agreement
    rings = [agreement.waits for agreement in (ring.agreement, inner) if agreement is not None]
    call = ring.agreement.begin(_COMPARISON, details={"order of calls": name})
    wait = ring.agreement.waiting(call, _abort_frameworks, lambda: [waits.progress for waits in rings])
    try:
        with wait as waited:
            yield
    except BaseException as error:
        if error is ring.agreement.raised_by_all or ring.agreement.has_failed:
            raise
        is_of_a_connection = isinstance(error, (dist.DistError, RingPeerError)) or "gloo" in str(error)
        if isinstance(error, RuntimeError) and (
            waited.is_ended
            or any(mark in str(error) for mark in _BROKEN_CONNECTION)
            or (is_of_a_connection and ring.agreement.notices.peer_has_closed())
        ):
            what = f"rank {ring.rank} waited in {name} for the collectives of the framework"
            late = dataclasses.replace(call, end=time.monotonic() + grace(call.timeout))
            ring.agreement.fail(late, what, error)
        if reports_errors:
            ring.agreement.report_error(name, error)
        raise


def _abort_frameworks() -> None:
    """Close the connections of all process groups except those of rings."""
    for group in list(internal(dist.distributed_c10d, "_world", "closing the connections of a failed ring").pg_map):
        if not group.group_desc.startswith(RING_GROUP_PREFIX):
            with contextlib.suppress(Exception):  # it cannot be aborted, or is gone already
                abort(group)


def do_on_rank0(ring: Ring, name: str, action: Callable[[], None]) -> None:
    """Run ``action`` on ring rank 0 only, and wait for it on all ranks. If it fails, raise on every rank.

    Raises:
        RuntimeError: on the other ranks, with the error that rank 0 raised.
        RingMismatchError, RingPeerError: a rank makes another call, or is gone.
    """
    do_on_all(ring, name, action if ring.rank == 0 else lambda: None)


def do_on_all(
    ring: Ring, name: str, action: Callable[[], Result], error_class: type[Exception] = RuntimeError
) -> Result:
    """Run ``action``, which does not communicate, on every rank. If it fails on one rank, raise on all.

    Args:
        error_class: the class that is raised on ranks without a failure, if all failures are of that class.

    Raises:
        Exception: on a rank where it failed, the error itself.
        error_class, RuntimeError: on the other ranks, with the text of the error.
        RingMismatchError, RingPeerError: a rank makes another call, or is gone.
    """
    error: BaseException | None = None
    try:
        result = action()
    except BaseException as raised:  # KeyboardInterrupt too: the other ranks are waiting
        error = raised
    mark = _EXPECTED if isinstance(error, error_class) else _OTHER
    texts = gather_texts(ring, name, "" if error is None else f"{mark}{type(error).__name__}: {error}", FILE_TIMEOUT)
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(texts) if text}
    if failed:
        are_expected = all(text.startswith(_EXPECTED) for text in failed.values())
        on = "; and on ".join(f"rank {rank}, which raised {text[1:]}" for rank, text in failed.items())
        raise (error_class if are_expected else RuntimeError)(f"{name} failed on {on}")
    return result


def _begin(ring: Ring, name: str, timeout: timedelta | None = None, **fields: object) -> Call | None:
    ring.check_connected()
    if ring.agreement is None:
        return None
    return ring.agreement.begin(Configuration({"order of calls": name, **fields}), timeout=timeout)


def _all_gather(ring: Ring, call: Call, mine: Tensor) -> Tensor:
    """All-gather a tensor of host memory, over a GPU if the ring has only NCCL."""
    mine = mine.to(_device(ring))
    gathered = ring.all_gather(call, mine, 0).cpu()
    if transfer.stream_device([mine]) is not None:
        ring.synchronize()  # what a GPU has received is garbage if a hop has failed
    return gathered


def _without_repetition(tensor: Tensor) -> Tensor:
    """A view of an expanded tensor without the repeated elements."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _device(ring: Ring) -> torch.device:
    """The device of the tensors that the ring's group can send: the CPU, unless the group has only NCCL."""
    if ring.group is None or "cpu:" in dist.get_backend_config(ring.group):
        return torch.device("cpu")
    return gpu_of(ring.group)
