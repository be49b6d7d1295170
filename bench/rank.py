"""Measurements on one rank. All ranks of a case call these functions at the same time.

The results go through a pipe to the parent process, so they are plain values. The measured times exclude the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import time
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from buffers import watched_buffers
from case import Case
from contestants import Call, prepare
from torch import Tensor

from ring_backends.cost.machine import (
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    select_device,
    synchronize,
    synchronize_ranks,
)
from ring_backends.registry import load_adapter
from ring_backends.releases import versions
from ring_backends.ring.ring import Ring

Direction = Literal["forward", "backward", "both"]

_TIMEOUT = timedelta(hours=1)
_WARM_UP_TOKENS = 64  # per rank


def timed(case: Case, direction: Direction) -> dict[str, Any]:
    """Time one call that all ranks begin together.

    The direction ``"both"`` is forward and backward, without a barrier between them. Inputs are kept for further calls
    of the case.

    Returns:
        The seconds, the seconds of waiting for hops, and the number of messages and bytes that this rank sends.
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
    found = {"seconds": seconds, "wait_seconds": traffic.wait_seconds, "messages": traffic.messages}
    if call.computed_bytes is None:
        return found | {"bytes": traffic.bytes}
    return found | {"bytes": sum(size for name, size in call.computed_bytes.items() if direction in (name, "both"))}


def peak_memory(case: Case) -> dict[str, int | None]:
    """Measure the peak memory of one forward and backward, including the inputs. The ranks should be new.

    A warm-up on a few tokens comes first. On the CPU, ``peak`` is the increase of the resident set. On a GPU, it is the
    increase of the allocated memory. ``buffers`` is the peak of the wire buffers, or None if the contestant has none.
    """
    device = _device(case)
    tokens = _WARM_UP_TOKENS * case.ring_size  # one segment over all ranks, so that all connections open
    warm = _prepare(dataclasses.replace(case, seq_len=tokens, branches=((tokens, 1),)))
    warm.backward(warm.forward())
    del warm
    _trim_heap()
    synchronize_ranks(device)
    reset_peak_memory(device)
    held = peak_memory_bytes(device)
    call = _prepare(case)
    with contextlib.nullcontext() if call.attention is None else watched_buffers(call.attention) as watch:
        call.backward(call.forward())
    synchronize_ranks(device)
    return {"peak": peak_memory_bytes(device) - held, "buffers": None if watch is None else watch.peak_bytes}


def results(case: Case) -> list[Tensor]:
    """Return out, dq, dk and dv of the whole sequence, on the CPU."""
    call = _prepare(case)
    out = call.forward()
    return [call.ring.unshard(x, seq_len=case.seq_len).cpu() for x in (out.detach(), *call.backward(out))]


def environment(case: Case) -> dict[str, Any]:
    """Return the device, the number of threads and the versions of this rank."""
    return {"device": device_name(_device(case)), "threads": torch.get_num_threads(), "versions": versions()}


def forget() -> None:
    """Free the inputs of earlier cases."""
    _call.cache_clear()
    gc.collect()


def leave() -> None:
    """Free the inputs, and destroy the process group. Only for processes that :class:`World` did not start."""
    forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _trim_heap() -> None:
    """Return freed memory to the operating system.

    Otherwise the next call could reuse it, and the resident set would not grow.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


@lru_cache(maxsize=2)  # two cases take turns
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
