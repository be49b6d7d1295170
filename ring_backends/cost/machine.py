"""The device of one rank: its choice, its name, its memory, and the time of its work."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ring_backends.ring.launcher import local_world_size

Name = TypeVar("Name")


def device_of_this_rank() -> torch.device:
    """Return the current GPU if the host has a GPU for each of its ranks, else the CPU."""
    if local_world_size() <= torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def select_device(wanted: str, local_ranks: int | None = None) -> torch.device:
    """Choose this rank's device, and make its GPU the current one.

    Args:
        wanted: ``"cpu"``, ``"cuda"`` or ``"auto"``. ``"auto"`` takes a GPU if the host has one for each of its ranks,
            else the CPU.
        local_ranks: number of ranks on this host. None: that of the launcher's environment.

    Raises:
        ValueError: ``wanted`` is ``"cuda"``, and the host has fewer GPUs than ranks.
    """
    if local_ranks is None:
        local_ranks = local_world_size()
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < local_ranks:
        raise ValueError(
            f"device = 'cuda': torch sees {gpus} GPU(s) for {local_ranks} rank(s) on this machine; start at most "
            f"{gpus} rank(s), or use --device cpu."
        )
    if wanted == "cpu" or gpus < local_ranks:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or "CPU" with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU with {threads} thread{'s' if threads > 1 else ''} per rank"


def available_memory_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including torch's unused cache, or the free memory of the host.

    Raises:
        OSError: the system does not say how much memory is available.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    table = Path("/proc/meminfo")
    if table.exists() and (found := re.search(r"^MemAvailable:\s*(\d+) kB", table.read_text(), re.MULTILINE)):
        available = int(found[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated memory on a GPU, resident set size on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        # On Linux ru_maxrss starts at the size of the parent process; VmHWM does not.
        status = Path("/proc/self/status").read_text()
        if own := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
            return int(own[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Reset :func:`peak_memory_bytes` to the memory in use now. On the CPU, this works only on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished its queued work. This does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    calls: Mapping[Name, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    calls_on_gpu: int,
    seconds: float = 0.0,
) -> dict[Name, float]:
    """Measure the median seconds of each call, after a warm-up call. The measurements of the calls are interleaved.

    Args:
        rounds, seconds: measure for at least this many rounds, and for at least this long per call.
        calls_on_gpu: calls per reading of the clock on a GPU. A reading waits for the GPU.
    """
    for call in calls.values():
        call()
    synchronize(device)
    at_once = calls_on_gpu if device.type == "cuda" else 1
    found: dict[Name, list[float]] = {name: [] for name in calls}
    started, number = time.perf_counter(), 0
    while number < rounds or time.perf_counter() - started < seconds * len(calls):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(at_once):
                call()
            synchronize(device)
            found[name].append((time.perf_counter() - begun) / at_once)
        number += 1
    return {name: statistics.median(times) for name, times in found.items()}


def synchronize_ranks(device: torch.device) -> None:
    """Wait until all ranks of the world have finished their work and have made this call."""
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
        synchronize(device)
