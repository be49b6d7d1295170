"""What one rank does when it is measured. All ranks of a case make these calls together.

Results are plain values: they travel back through a pipe, which the times do not include.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from buffers import watched_buffers
from case import Case
from contestants import Call, inputs, prepare
from torch import Tensor

from ring_backends.comparison.timeline import Span, record_spans
from ring_backends.cost.machine import (
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    select_device,
    synchronize,
    synchronize_ranks,
    versions,
)
from ring_backends.registry import load_adapter
from ring_backends.ring.ring import Ring

Direction = Literal["forward", "backward", "both"]

_TIMEOUT = timedelta(hours=1)
_WARM_UP_TOKENS = 64  # per rank


def timed(case: Case, direction: Direction) -> dict[str, Any]:
    """One call, begun by all ranks together: its seconds, those spent waiting for hops, messages and bytes sent.

    ``"both"`` is forward and backward with no meeting between them. Inputs are kept for the next call of the case.
    """
    device, call = _device(case), _call(case)
    saved = call.forward() if direction == "backward" else None
    traffic = call.ring.traffic
    synchronize_ranks(device)
    traffic.reset()
    started = time.perf_counter()
    if direction != "backward":
        saved = call.forward()
    if direction != "forward":
        grads = call.backward(saved)
    synchronize(device)
    seconds = time.perf_counter() - started
    del saved
    if direction != "forward":
        del grads
    sent = traffic.bytes if call.computed_bytes is None else _sent(call.computed_bytes, direction)
    return {
        "seconds": seconds,
        "wait_seconds": traffic.wait_seconds,
        "messages": traffic.messages,
        "bytes": sent,
    }


def peak_memory(case: Case) -> dict[str, int | None]:
    """What one forward and backward needs at its peak, its inputs included, in bytes: for ranks that did nothing else.

    On the CPU it is the increase of the resident set, over that of a process that has warmed up on a few tokens; on a
    GPU that of the allocated memory. ``buffers`` are those of the hops alive together, for adapters' rings.
    """
    device = _device(case)
    tokens = _WARM_UP_TOKENS * case.ring_size  # in one segment, so that connections are opened too
    warm = _prepare(dataclasses.replace(case, seq_len=tokens, branches=((tokens, 1),)))
    warm.backward(warm.forward())
    del warm
    _give_back()
    synchronize_ranks(device)
    reset_peak_memory(device)
    held = peak_memory_bytes(device)
    call = _prepare(case)
    if call.attention is None:
        call.backward(call.forward())
        buffers = None
    else:
        with watched_buffers(call.attention) as watch:
            call.backward(call.forward())
        buffers = watch.most
    synchronize_ranks(device)
    return {"peak": peak_memory_bytes(device) - held, "buffers": buffers}


def results(case: Case) -> list[Tensor]:
    """query, key, value, grad_out, out, dq, dk and dv of the whole sequence, on the CPU."""
    ring, device = _ring(case.adapter, case.layout), _device(case)
    call = _prepare(case)
    out = call.forward()
    computed = [out.detach(), *call.backward(out)]
    local = [x.detach() for x in inputs(case, ring, device)] + computed
    return [ring.unshard(x, seq_len=case.seq_len).cpu() for x in local]


def spans(case: Case) -> list[Span]:
    """When this rank computed, posted hops and waited for them, in one forward and one backward."""
    device, call = _device(case), _call(case)
    call.backward(call.forward())

    saved = []

    def forward() -> None:
        saved.append(call.forward())
        synchronize(device)

    def backward() -> None:
        call.backward(saved.pop())
        synchronize(device)

    return record_spans({"forward": forward, "backward": backward}, lambda: synchronize_ranks(device))


def environment(case: Case) -> dict[str, Any]:
    """Where and with what a rank runs."""
    return {"device": device_name(_device(case)), "threads": torch.get_num_threads(), "versions": versions()}


def forget() -> None:
    """Let go of the inputs of cases measured before."""
    _call.cache_clear()
    gc.collect()


def leave() -> None:
    """End the process group, where no world does so."""
    forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _give_back() -> None:
    """Return freed memory to the system, as far as the C library can: else a call would find it there for nothing."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@lru_cache(maxsize=2)  # two that take turns
def _call(case: Case) -> Call:
    return _prepare(case)


def _prepare(case: Case) -> Call:
    return prepare(case, _ring(case.adapter, case.layout), _device(case))


@lru_cache
def _new_ring(adapter: str) -> Ring:
    ring: Ring = load_adapter(adapter).initialize(timeout=_TIMEOUT)
    return ring


def _ring(adapter: str, layout: Any) -> Ring:
    return _new_ring(adapter).with_layout(layout)


def _device(case: Case) -> torch.device:
    if case.device == "cpu":
        return select_device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _sent(computed: Mapping[str, int], direction: Direction) -> int:
    return sum(size for name, size in computed.items() if direction in (name, "both"))
