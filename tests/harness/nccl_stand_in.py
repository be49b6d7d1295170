"""A strict stand-in for NCCL and for the streams of a GPU, to test rings without either.

:func:`install` replaces the point-to-point batches of rings in a process by those of a simulated communicator, and lets
the process compute on a simulated GPU. Whatever NCCL and CUDA leave undefined goes wrong here:

- Messages have no tags. The messages of a pair of ranks are paired first in, first out.
- A batch is one work. The works of a communicator are carried out one after another, on a stream of its own, a moment
  after they could be.
- ``wait()`` makes the current stream wait, and returns to the host at once.
- The first operation of a communicator waits for all ranks. The first message to or from a peer waits, on the host,
  until the peer has posted it, too.
- A message is sent when its receiver takes it. If their sizes differ, both hang until the communicator is aborted.
- An aborted work is over, and has received nothing.
- Memory that the host frees is overwritten, as if another tensor had it, once the stream on which it was allocated
  comes to that place. Torch would hold the memory until NCCL's stream has used it. :func:`allocated_bytes` counts it.
- A wire buffer that is given back is overwritten, too, once the current stream comes to that place.

The simulated GPU computes on CPU tensors. A *dispatch mode* receives every operator of torch. It allocates the result
and returns it at once, and a thread, which is the stream, computes it later. Reading a value on the host waits for the
current stream, as with CUDA. Collectives of torch.distributed on tensors of the GPU wait, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine import operators
from ring_backends.engine.call import AttentionInputs
from ring_backends.kernels import aten_cpu, blockwise
from ring_backends.ring import rendezvous, stream_hops, transfer
from ring_backends.ring.wire_memory import BlockMemory

DEVICE = torch.device("cpu")
"""The device of the tensors of the simulated GPU."""

DELAY = 0.0005
"""Seconds by which each work begins later than it could, so that whoever does not wait for it comes too early."""

_GARBAGE = 255
"""The value of the bytes of freed memory. Floats are NaN then, and integers −1."""

_SENDS, _RECEIVES, _TAKEN, _MESSAGE = b"sends", b"receives", b"taken", b"message"
"""The first bytes of what two ranks tell each other: that this rank sends to the other one or receives from it, that it
has taken a message, and a message."""

_FACTORIES = ("empty", "empty_strided", "zeros", "ones", "full", "arange", "rand", "randn", "scalar_tensor")
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Stream:
    """A stream: operations that a thread carries out one after another.

    Attributes:
        error: the first error of an operation. Later operations are carried out nevertheless.
    """

    error: Exception | None = None

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device or DEVICE
        self._operations: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=_carry_out, args=(weakref.ref(self), self._operations), daemon=True).start()
        weakref.finalize(self, self._operations.put, None)

    def add(self, operation: Callable[[], object]) -> None:
        self._operations.put(operation)

    def record(self) -> threading.Event:
        """An event that is set when all operations so far are over."""
        event = threading.Event()
        self.add(event.set)
        return event

    def wait_for(self, event: threading.Event) -> None:
        self.add(event.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_for(other.record())

    def synchronize(self) -> None:
        self.record().wait()
        if self.error is not None:
            raise RuntimeError(f"an operation on a simulated stream failed: {self.error}") from self.error


def _carry_out(stream: weakref.ref[Stream], operations: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    with torch.inference_mode():  # which may write tensors of either kind
        while (operation := operations.get()) is not None:
            try:
                operation()
            except Exception as error:
                owner = stream()
                if owner is not None and owner.error is None:
                    owner.error = error
            del operation  # the tensors that it holds


class _Thread(threading.local):
    """The streams of one thread of the host. In a process with several ranks, each thread is one."""

    def __init__(self) -> None:
        self.default, self.watching = Stream(), Stream()
        self.entered: list[Stream] = []


_thread = _Thread()


def current_stream(device: object = None) -> Stream:
    return _thread.entered[-1] if _thread.entered else _thread.default


def watching_stream(device: object = None) -> Stream:
    """The stream on which this thread follows hops."""
    return _thread.watching


@contextlib.contextmanager
def _enter(stream: Stream) -> Iterator[None]:
    _thread.entered.append(stream)
    try:
        yield
    finally:
        _thread.entered.pop()


@dataclass(eq=False)
class Block:
    """Memory of the simulated GPU.

    Attributes:
        memory: uint8 [bytes]. Streams use it, and it lives as long as they do. The host uses other tensors over the
            same memory, whose end is that of the block for the allocator.
        stream: the stream on which it was allocated.
        is_pending: whether operations on streams use it. Before, it is like memory of the host.
        recorded: other streams that ``record_stream`` was called for. The memory is in use until they come here.
        of_nccl: the streams of communicators that send or receive it. torch calls ``record_stream`` for them.
    """

    memory: Tensor
    stream: Stream
    is_pending: bool = False
    recorded: set[Stream] = field(default_factory=set)
    of_nccl: set[Stream] = field(default_factory=set)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor like ``tensor``, over the memory of the block."""
        alias = torch.empty(0, dtype=tensor.dtype)
        alias.set_(self.memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        return alias.conj() if tensor.is_conj() else alias


class Allocator:
    """The blocks of a simulated GPU."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._freed: list[tuple[int, list[threading.Event]]] = []
        self._adopted: list[int] = []
        self._in_use = 64
        self._bytes = self._peak = 0

    def allocate(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor for the host over a new block."""
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        nbytes = like.untyped_storage().nbytes()
        if not nbytes:
            return torch.empty_strided(size, stride, dtype=dtype)
        memory = torch.full((nbytes,), _GARBAGE, dtype=torch.uint8)
        handle = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        storage = torch.frombuffer(handle, dtype=torch.uint8).untyped_storage()
        block = Block(memory, current_stream())
        self._blocks[storage._cdata] = block
        weakref.finalize(handle, self._free, storage._cdata, block).atexit = False
        self._bytes += nbytes
        self._peak = max(self._peak, self.allocated_bytes())
        return torch.empty(0, dtype=dtype).set_(storage, 0, list(size), list(stride))

    def block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def adopt(self, tensor: Tensor) -> Block:
        """The block of a tensor. Memory of the host becomes one, which is never freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._blocks[storage._cdata] = Block(memory, current_stream())
            self._adopted.append(storage._cdata)
            if len(self._adopted) > 2 * self._in_use:
                self._forget_unused()
        return self._blocks[storage._cdata]

    def _forget_unused(self) -> None:
        """Forget adopted blocks that only this allocator holds."""
        used = [key for key in self._adopted if torch._C._storage_Use_Count(key) > 1]
        for key in {*self._adopted} - {*used}:
            del self._blocks[key]
        self._adopted, self._in_use = used, max(64, len(used))

    def _free(self, key: int, block: Block) -> None:
        nbytes = len(block.memory)
        if self._blocks.get(key) is block:
            del self._blocks[key]
        self._bytes -= nbytes
        if block.recorded or block.of_nccl:
            self._freed.append((nbytes, [stream.record() for stream in block.recorded | block.of_nccl]))
        if block.is_pending:  # from here on, another tensor may use the memory, in the order of this stream
            last = block.stream
            for stream in block.recorded:
                stream.wait_stream(last)
                last = stream
            last.add(functools.partial(block.memory.fill_, _GARBAGE))

    def allocated_bytes(self) -> int:
        """Bytes that are in use, and those that are freed while a recorded stream may use them."""
        self._freed = [entry for entry in self._freed if not all(event.is_set() for event in entry[1])]
        return self._bytes + sum(nbytes for nbytes, _ in self._freed)

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.allocated_bytes()


class Gpu(TorchDispatchMode):
    """A simulated GPU: operators on its tensors return at once, and are carried out on the current stream.

    An operator whose tensors are all in the memory of the host is carried out at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator = Allocator()

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the host on the GPU."""
        copy = self.allocator.allocate(tensor.size(), tensor.contiguous().stride(), tensor.dtype)
        with torch.no_grad():
            self.uses(copy.copy_(tensor.detach()))
        return copy.requires_grad_(tensor.requires_grad)

    def uses(self, tensor: Tensor) -> Tensor:
        """From now on operators on ``tensor`` are carried out on streams. Return it for these operators."""
        block = self.allocator.adopt(tensor)
        block.is_pending = True
        return block.like(tensor)

    def is_on_gpu(self, tensor: Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.device != DEVICE or tensor.layout != torch.strided:
            return False
        block = self.allocator.block(tensor)
        return block is not None and block.is_pending

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ring_backends":
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [value for value in _flat([args, kwargs]) if isinstance(value, Tensor)]
        if not any(map(self.is_on_gpu, tensors)):
            made = func(*args, **kwargs)
            is_factory = not tensors and type(made) is Tensor and func._overloadpacket.__name__ in _FACTORIES
            return self._rehouse(made) if is_factory and made.device == DEVICE and made.numel() else made
        operator = _operator(func)
        if operator.is_view or kwargs.get("device", DEVICE) not in (DEVICE, None):  # such as meta tensors
            return func(*args, **kwargs)
        if operator.waits:
            current_stream().synchronize()
            return func(*args, **kwargs)
        if operator.writes:
            places = ((name, args[place] if place < len(args) else kwargs[name]) for place, name in operator.writes)
            written = [value for _, argument in places for value in _flat(argument)]
            targets: list[Tensor] = []
            result = None if operator.returns_nothing else written[0] if len(written) == 1 else tuple(written)
        else:
            key = func, _key(args), _key(kwargs)
            if key not in _results:
                _results[key] = _results_of(func, args, kwargs)
            made_of, written = _results[key], []
            if made_of is None:
                current_stream().synchronize()
                return func(*args, **kwargs)
            result = _map(lambda like: self.allocator.allocate(*like.value), made_of)
            targets = [self.uses(tensor) if tensor.numel() else torch.empty_like(tensor) for tensor in _flat(result)]
        of_stream = functools.partial(self._input, {id(tensor) for tensor in written})
        inputs = _map(of_stream, args), {name: _map(of_stream, value) for name, value in kwargs.items()}
        current_stream().add(functools.partial(_compute, func, *inputs, targets))
        return result

    def _rehouse(self, made: Tensor) -> Tensor:
        return self.allocator.allocate(made.size(), made.stride(), made.dtype).copy_(made)

    def _input(self, written: set[int], value: Any) -> Any:
        """What a stream uses in place of an argument."""
        if not isinstance(value, Tensor) or value.device != DEVICE:
            return value
        if not value.numel():
            return torch.empty_like(value)
        if id(value) in written or self.is_on_gpu(value):
            return self.uses(value)
        return value.detach().clone()  # of the host, which may overwrite it


@dataclass(frozen=True)
class _Operator:
    """What the simulated GPU knows of an operator of torch.

    Attributes:
        is_view: whether its results share the memory of its arguments.
        waits: whether its results depend on values, or other processes take part in it.
        writes: place and name of the arguments that it writes.
        returns_nothing: whether it returns None instead of these arguments.
    """

    is_view: bool
    waits: bool
    writes: tuple[tuple[int, str], ...]
    returns_nothing: bool


@functools.cache
def _operator(func: Any) -> _Operator:
    returns, arguments = func._schema.returns, enumerate(func._schema.arguments)
    writes = tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)
    aliases = [x.alias_info for x in returns if x.alias_info is not None]
    is_view = bool(returns) and len(aliases) == len(returns) and not any(alias.is_write for alias in aliases)
    of_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.intersection(func.tags)
    is_unknown = bool(writes) and len(returns) not in (0, len(writes))
    return _Operator(is_view, bool(of_values) or func.namespace == "c10d" or is_unknown, writes, not returns)


@dataclass(frozen=True)
class _Like:
    """The size, strides and dtype of a result."""

    value: tuple[Sequence[int], Sequence[int], torch.dtype]


_results: dict[object, Any] = {}


def _results_of(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator, as :class:`_Like`; None if they are not tensors, or meta tensors cannot tell."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        made = func(*_map(on_meta, args), **{name: _map(on_meta, value) for name, value in kwargs.items()})
    except (NotImplementedError, RuntimeError):
        return None
    flat = _flat(made)
    if not flat or not all(isinstance(value, Tensor) for value in flat):
        return None
    return _map(lambda value: _Like((value.size(), value.stride(), value.dtype)), made)


def _compute(func: Any, args: Any, kwargs: Any, targets: list[Tensor]) -> None:
    computed = func(*args, **kwargs)
    if targets:
        for target, value in zip(targets, _flat(computed), strict=True):
            target.copy_(value)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [x for part in value for x in _flat(part)] if isinstance(value, (list, tuple)) else [value]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_map(function, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return function(value)


def _key(value: Any) -> object:
    """All of an argument that shapes the results."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), str(value))


class CommunicatorAbortedError(RuntimeError):
    """A communicator was aborted while the host waited for it."""


class Communicator:
    """One rank's part of a simulated communicator.

    Args:
        store: shared by its ranks.
        rank, size: this rank among them.

    Attributes:
        latest: the work of the last batch.
    """

    latest: Work

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.stream = Stream()
        self.is_aborted = threading.Event()
        self.changed, self._sending = threading.Condition(), threading.Lock()
        self._listener: Listener | None = None
        self._connections: dict[int, Connection] = {}
        self._told: set[tuple[int, bytes]] = set()  # what this rank has told other ranks that it does
        self._heard: set[tuple[int, bytes]] = set()  # what they have told
        self._inbox: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._taken: defaultdict[int, int] = defaultdict(int)

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Work:
        """Post a batch: contiguous tensors to and from ranks. The host waits for ranks that it has not met."""
        self.meet([peer for peer, _ in sends], [peer for peer, _ in receives])
        for _, tensor in (*sends, *receives):
            assert tensor.is_contiguous(), f"NCCL takes contiguous tensors, got strides {tensor.stride()}"
        buffers = [[(peer, gpu().uses(tensor)) for peer, tensor in part] for part in (sends, receives)]
        for _, tensor in (*sends, *receives):
            gpu().allocator.adopt(tensor).of_nccl.add(self.stream)
        self.stream.wait_stream(current_stream())
        self.stream.add(functools.partial(self._carry, *buffers))
        self.latest = Work(self.stream.record())
        return self.latest

    def abort(self) -> None:
        """End all works, now and later."""
        self.is_aborted.set()
        with self.changed:
            self.changed.notify_all()

    def forget(self) -> None:
        """Meet all other ranks again at the next batch with them."""
        self._told, self._heard = set(), set()

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for the other ranks. Return False if the communicator was aborted before the condition held."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_aborted.is_set() or condition())
        return not self.is_aborted.is_set()

    def meet(self, sends: Iterable[int], receives: Iterable[int]) -> None:
        """Wait on the host until ranks that this one first sends to, or receives from, do their part.

        The first time, wait for all ranks.

        Raises:
            CommunicatorAbortedError: the communicator was aborted meanwhile.
        """
        told = {*((peer, _SENDS) for peer in sends), *((peer, _RECEIVES) for peer in receives)}
        told -= self._told | {(self.rank, _SENDS), (self.rank, _RECEIVES)}
        if self._listener is None:
            self._join()
        peers = {peer for peer, _ in told}
        for peer in sorted(peers):
            if self.rank > peer and peer not in self._connections:
                self._open(peer, Client(self._store.get(f"address/{peer}").decode()))
                self._connections[peer].send_bytes(self.rank.to_bytes(4, "little"))
        if not self.wait_until(lambda: peers <= {*self._connections}):
            raise CommunicatorAbortedError("NCCL communicator was aborted")
        for peer, what in told:
            self._send(peer, what)
        self._told |= told
        answers = {(peer, _RECEIVES if what == _SENDS else _SENDS) for peer, what in told}
        if not self.wait_until(lambda: answers <= self._heard):
            raise CommunicatorAbortedError("NCCL communicator was aborted")

    def _join(self) -> None:
        """Wait for all ranks, as the creation of a communicator does."""
        self._listener = Listener(backlog=self.size)
        threading.Thread(target=_accept, args=(weakref.ref(self), self._listener), daemon=True).start()
        self._store.set(f"address/{self.rank}", str(self._listener.address))
        while not self._store.check([f"address/{rank}" for rank in range(self.size)]):
            if self.is_aborted.wait(0.005):
                raise CommunicatorAbortedError("NCCL communicator was aborted")

    def _open(self, peer: int, connection: Connection) -> None:
        with self.changed:
            self._connections[peer] = connection
            self.changed.notify_all()
        threading.Thread(target=_listen, args=(weakref.ref(self), peer, connection), daemon=True).start()

    def heard(self, peer: int, frame: bytes) -> None:
        with self.changed:
            if frame in (_SENDS, _RECEIVES):
                self._heard.add((peer, frame))
            elif frame == _TAKEN:
                self._taken[peer] += 1
            else:
                self._inbox[peer].append(frame.removeprefix(_MESSAGE))
            self.changed.notify_all()

    def _carry(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        time.sleep(DELAY)
        for peer, buffer in sends:
            self._sent[peer] += 1
            self._send(peer, _MESSAGE + ctypes.string_at(buffer.data_ptr(), buffer.nbytes))
        for peer, buffer in receives:
            if not self.wait_until(functools.partial(self._has_message, peer, buffer.nbytes)):
                return
            ctypes.memmove(buffer.data_ptr(), self._inbox[peer].popleft(), buffer.nbytes)
            self._send(peer, _TAKEN)
        self.wait_until(lambda: all(self._taken[peer] == self._sent[peer] for peer, _ in sends))

    def _has_message(self, peer: int, nbytes: int) -> bool:
        return bool(self._inbox[peer]) and len(self._inbox[peer][0]) == nbytes

    def _send(self, peer: int, frame: bytes) -> None:
        if peer == self.rank:
            self.heard(peer, frame)
        else:
            with contextlib.suppress(OSError), self._sending:  # a peer that has left takes no message
                self._connections[peer].send_bytes(frame)


def _accept(communicator: weakref.ref[Communicator], listener: Listener) -> None:
    while True:
        connection = listener.accept()
        owner = communicator()
        if owner is None:
            return
        owner._open(int.from_bytes(connection.recv_bytes(), "little"), connection)
        del owner


def _listen(communicator: weakref.ref[Communicator], peer: int, connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            frame = connection.recv_bytes()
            owner = communicator()
            if owner is None:
                return
            owner.heard(peer, frame)
            del owner


@dataclass(frozen=True)
class Work:
    """The work of one batch."""

    over: threading.Event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait. With a timeout the host waits, too."""
        current_stream().wait_for(self.over)
        if timeout is not None and not self.over.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"a work of NCCL took longer than {timeout}")
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Process:
    """The simulated GPU and communicators of this process."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()

    def communicator(self, group: dist.ProcessGroup) -> Communicator:
        if group not in self.communicators:
            store = PrefixStore("nccl", dist.distributed_c10d._world.pg_map[group][1])
            self.communicators[group] = Communicator(store, group.rank(), group.size())
        return self.communicators[group]


_process: list[Process] = []


def gpu() -> Gpu:
    """The simulated GPU of this process."""
    return _process[-1].gpu


def synchronize(device: object = None) -> None:
    """Wait until the current stream has carried out everything, and so have those that it waits for."""
    current_stream().synchronize()


def to_device(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the simulated GPU."""
    return gpu().put(tensor)


def allocated_bytes() -> int:
    """Bytes of the simulated GPU that tensors hold, or that another stream may still use."""
    return gpu().allocator.allocated_bytes()


def peak_bytes() -> int:
    """The largest value of :func:`allocated_bytes` since the last :func:`reset_peak`."""
    return gpu().allocator.peak_bytes()


def reset_peak() -> None:
    gpu().allocator.reset_peak()


class HostNumbers:
    """Pinned memory, into which the current stream copies ``numbers``. Zero before, and read without waiting."""

    def __init__(self, numbers: Tensor) -> None:
        self._values = [0] * len(numbers)
        source = gpu().uses(numbers)
        current_stream().add(lambda: self._copy(source))

    def _copy(self, source: Tensor) -> None:
        self._values = (source | stream_hops._ARRIVED).tolist()

    def tolist(self) -> list[int]:
        return self._values


def _batch(original: Callable[[list[dist.P2POp]], list[Any]], operations: list[dist.P2POp]) -> list[Any]:
    group = operations[0].group
    if group is None or not group.group_desc.startswith(rendezvous.RING_GROUP_PREFIX):
        return original(operations)
    parts: dict[Any, list[tuple[int, Tensor]]] = {dist.isend: [], dist.irecv: []}
    for operation in operations:
        parts[operation.op].append((operation.group_peer, operation.tensor))
    return [_process[-1].communicator(group).post(parts[dist.isend], parts[dist.irecv])]


def _abort(original: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup) -> None:
    if group.group_desc.startswith(rendezvous.RING_GROUP_PREFIX):
        _process[-1].communicator(group).abort()
    else:
        original(group)


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Tensor that reads values without an operator of torch."""

    @functools.wraps(original)
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if gpu().is_on_gpu(tensor):
            current_stream().synchronize()
        return original(tensor, *args, **kwargs)

    return read


@contextlib.contextmanager
def simulated_gpu() -> Iterator[Process]:
    """Replace CUDA and NCCL in this process. A thread that computes enters ``gpu`` of the result, too."""
    process = Process()
    _process.append(process)
    batch = functools.partial(_batch, dist.batch_isend_irecv)
    patches: list[tuple[object, str, object]] = [
        (dist, "batch_isend_irecv", batch),
        (dist.distributed_c10d, "batch_isend_irecv", batch),
        (rendezvous, "_nccl_device", lambda group: DEVICE),
        (rendezvous, "_nccl_has_error", lambda group: False),
        (rendezvous, "abort", functools.partial(_abort, rendezvous.abort)),
        (transfer, "needs_host", lambda group, device: False),
        (transfer, "stream_device", lambda buffers: DEVICE),
        (stream_hops, "_watching_stream", watching_stream),
        (stream_hops, "_copy_to_host", HostNumbers),
        (torch.cuda, "stream", _enter),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "synchronize", synchronize),
        (torch.cuda, "Event", _forbidden),
        (aten_cpu, "all_finite", lambda *_: True),  # else the host would wait for each tile
        (blockwise, "_is_finite", lambda tensor: False),
        (BlockMemory, "give_back", _overwriting(BlockMemory.give_back)),
        (RingDilatedAttention, "_attend", _on_gpu(RingDilatedAttention._attend)),
        (operators, "in_dispatch_mode", lambda: torch._C._len_torch_dispatch_stack() > 1),
        (operators, "without_dispatch_modes", _gpu_alone),
        (Tensor, "record_stream", lambda tensor, stream: gpu().allocator.adopt(tensor).recorded.add(stream)),
        *((Tensor, name, _reading(getattr(Tensor, name))) for name in ("tolist", "numpy", "__reduce_ex__")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield process
        finally:
            _process.remove(process)


def _overwriting(give_back: Callable[..., None]) -> Callable[..., None]:
    """Let the current stream overwrite the buffers, as later buffers may."""

    def overwrite(memory: BlockMemory, *buffers: Tensor) -> None:
        for buffer in buffers:
            buffer.fill_(_GARBAGE)
        give_back(memory, *buffers)

    return overwrite


def _on_gpu(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Let the inputs of attention be on the GPU, wherever they were."""

    def attend_on_gpu(module: RingDilatedAttention, inputs: AttentionInputs) -> Any:
        for tensor in inputs.tensors:
            if tensor is not None and type(tensor) in _PLAIN and tensor.device == DEVICE and tensor.numel():
                gpu().uses(tensor)
        return attend(module, inputs)

    return attend_on_gpu


@contextlib.contextmanager
def _gpu_alone() -> Iterator[None]:
    with _disable_current_modes(), gpu():
        yield


def _forbidden(*_: object, **__: object) -> None:
    raise AssertionError("the query of an event may end the capture of a CUDA graph in another thread")


_installed = contextlib.ExitStack()


def install() -> None:
    """Let this process compute on a simulated GPU, and its rings use the simulated NCCL, from now on."""
    process = _installed.enter_context(simulated_gpu())
    _installed.enter_context(process.gpu)
