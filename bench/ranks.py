"""The ranks that run measurements, and what each of them measures.

A rank is a process with one thread, and many cases share it. All ranks of a case make its calls at the same time. The
results go through a pipe to this process, so they are plain values. The measured times exclude the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal
from unittest import mock

from case import Case
from clock import CPU, in_turns, start
from contestants import Call, prepare
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ring_backends import Ring
from ring_backends.cost.machine import peak_memory_bytes, reset_peak_memory, synchronize_ranks
from ring_backends.registry import load_adapter
from ring_backends.testing.world import World

Direction = Literal["forward", "backward", "both"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

TIMEOUT = 3 * 3600.0  # seconds; one call of a dense method at 65,536 tokens takes minutes
_WARM_UP_TOKENS = 64  # per rank


class Worlds(contextlib.ExitStack):
    """Holds one set of ranks for each adapter and ring size, and starts it at its first use. It ends them at exit."""

    def __init__(self) -> None:
        super().__init__()
        self._worlds: dict[tuple[str, int], World] = {}

    def of(self, case: Case) -> World:
        """Return the ranks for ``case``. Other cases share them."""
        at = case.adapter, case.ring_size
        if at not in self._worlds:
            self._worlds[at] = self.enter_context(World(case.ring_size, call_timeout=TIMEOUT))
        return self._worlds[at]

    def time(self, case: Case, direction: Direction) -> dict[str, Any]:
        """Time one call.

        Returns:
            The seconds of the slowest rank, and for each rank the share of its time that it waits for hops, and the
            messages and bytes that it sends.
        """
        ranks = self.of(case).run(timed, case, direction)
        return {
            "seconds": max(found["seconds"] for found in ranks),
            "wait_share": [found["wait_seconds"] / found["seconds"] for found in ranks],
            **{name: [found[name] for found in ranks] for name in ("messages", "bytes")},
        }

    def in_turns(self, *cases: Case, direction: Direction, repeats: int, shorter: int = 1) -> list[list[float]]:
        """The seconds of each case's calls. ``shorter`` divides the lengths of a case's warm-up call."""
        for case in cases:
            self.time(case.shortened(shorter), direction)

        def begin(case: Case) -> Callable[[], float]:
            seconds: float = self.time(case, direction)["seconds"]
            return lambda: seconds

        found = in_turns([lambda case=case: begin(case) for case in cases], repeats, warm_up=0)  # type: ignore[misc]
        self.forget()
        return found

    def peak_memory(self, case: Case) -> dict[str, list[int]]:
        """Measure the peak memory of forward and backward with the inputs, and that of the wire buffers, by rank."""
        with World(
            case.ring_size, call_timeout=TIMEOUT
        ) as world:  # others may have memory of earlier cases in the heap
            ranks = world.run(peak_memory, case)
        return {f"{name}_bytes": [found[name] for found in ranks] for name in ("peak", "buffers")}

    def forget(self) -> None:
        """Let the ranks free the inputs of earlier cases."""
        for world in self._worlds.values():
            world.run(forget)


def timed(case: Case, direction: Direction) -> dict[str, Any]:
    """Time one call that all ranks begin together, and count the messages and bytes that this rank sends.

    The direction ``"both"`` is forward and backward, without a barrier between them. Inputs are kept for further calls
    of the case.
    """
    call = _call(case)
    saved = call.forward() if direction == "backward" else None
    traffic = call.ring.traffic
    traffic.reset()

    def run() -> Any:
        out = call.forward() if saved is None else saved
        return out if direction == "forward" else (out, call.backward(out))

    seconds = start(run)()
    return {"seconds": seconds, **dataclasses.asdict(traffic)}


def peak_memory(case: Case) -> dict[str, int]:
    """Measure the peak memory of one forward and backward, including the inputs. The ranks should be new.

    A warm-up on a few tokens comes first. ``peak`` is the increase of the resident set. ``buffers`` is the peak of the
    buffers that hops send or receive.
    """
    tokens = _WARM_UP_TOKENS * case.ring_size  # one segment over all ranks, so that all connections open
    warm = _prepare(case.but(seq_len=tokens, branches=((tokens, 1),)))
    warm.backward(warm.forward())
    del warm
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        # Return freed memory to the operating system. Otherwise the next call could reuse it, and the resident set
        # would not grow.
        ctypes.CDLL(None).malloc_trim(0)
    synchronize_ranks(CPU)
    reset_peak_memory(CPU)
    held = peak_memory_bytes(CPU)
    call = _prepare(case)
    with _watched_buffers(call.attention) as peaks:
        call.backward(call.forward())
    synchronize_ranks(CPU)
    return {"peak": peak_memory_bytes(CPU) - held, "buffers": max(peaks)}


@contextlib.contextmanager
def _watched_buffers(attention: Any) -> Iterator[list[int]]:
    """The bytes of all buffers of hops that are in memory whenever ``attention`` posts a hop."""
    peaks, alive = [0], dict[int, tuple[StorageWeakRef, int]]()
    if attention is None:
        yield peaks
        return
    post = attention.ring_pass

    def post_and_watch(outgoing: Any, incoming: Any, tag: int) -> Any:
        for buffer in (*outgoing.values(), *incoming.values()):
            storage = buffer.untyped_storage()
            alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        for at in [at for at, (storage, _) in alive.items() if storage.expired()]:
            del alive[at]
        peaks.append(sum(size for _, size in alive.values()))
        return post(outgoing, incoming, tag)

    with mock.patch.object(attention, "ring_pass", post_and_watch):
        yield peaks


def results(case: Case) -> list[Tensor]:
    """Return out, dq, dk and dv of the whole sequence."""
    call = _prepare(case)
    out = call.forward()
    return [call.ring.unshard(x, seq_len=case.seq_len) for x in (out.detach(), *call.backward(out))]


def forget() -> None:
    """Free the inputs of earlier cases."""
    _call.cache_clear()
    gc.collect()


@lru_cache(maxsize=4)  # these cases take turns
def _call(case: Case) -> Call:
    return _prepare(case)


def _prepare(case: Case) -> Call:
    return prepare(case, _new_ring(case.adapter, case.ulysses_size).with_layout(case.layout), CPU)


@lru_cache
def _new_ring(adapter: str, ulysses_size: int) -> Ring:
    ring: Ring = load_adapter(adapter).initialize(timeout=timedelta(hours=1), ulysses_size=ulysses_size)
    return ring
