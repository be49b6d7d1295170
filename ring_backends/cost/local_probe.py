"""Measures the constants of the cost model on local ranks, and reads measurements from a file.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ring_backends.cost.hardware import Hardware
from ring_backends.ring.launch import launch, num_cores, refuse_launcher

_SECONDS = 0.3
SMALL_HOP_BYTES = 64 * 2**10
"""Size of the hop whose time :func:`measure` reports in addition to the constants of the model."""


def measure(num_ranks: int, dtype: str, device: str, head_dim: int = 64) -> dict[str, Any]:
    """Start ranks on this machine, and measure on all of them at the same time.

    Args:
        num_ranks: at least 2.
        dtype: ``"auto"``, ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``, or torch's name, such as ``"float32"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``, as in :func:`~ring_backends.cost.machine.select_device`.
        head_dim: head dimension of the tiles.

    Returns:
        A dict. ``hardware`` holds the constants of the slowest rank, under the names of :class:`Hardware`.
        ``latency_seconds`` is the time of a hop of 64 KiB. ``bytes_per_second`` is the bandwidth in each direction, for
        hops of 16 MiB. ``ranks``, ``transport``, ``device``, ``device_type``, ``dtype``, ``head_dim``, ``kernel`` and
        ``torch`` describe the measurement.

    Raises:
        ValueError: a launcher such as torchrun started this process.
        RankFailedError: a rank failed.
    """
    from ring_backends.cost.probe import slowest

    refuse_launcher("the measurement")
    # The number of threads that `launch` gives to a rank that runs alone.
    threads = int(os.environ.get("OMP_NUM_THREADS", num_cores()))
    found = launch(_measure_rank, (dtype, device, head_dim, threads), num_ranks)
    hardware = slowest([rank["hardware"] for rank in found])
    # All ranks are on this machine. If others are not, `plan` gets the latency and bandwidth between hosts as options.
    latency, bandwidth = hardware.latency_seconds, hardware.bytes_per_second
    hardware = dataclasses.replace(hardware, host_latency_seconds=latency, host_bytes_per_second=bandwidth)
    return {
        **found[0],
        "latency_seconds": max(rank["latency_seconds"] for rank in found),
        "bytes_per_second": hardware.bytes_per_second,
        "ranks": len(found),
        "hardware": dataclasses.asdict(hardware),
    }


def _measure_rank(dtype: str, device: str, head_dim: int, threads_alone: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from ring_backends.cost.machine import available_memory_bytes, device_name, select_device
    from ring_backends.cost.probe import RankProbe
    from ring_backends.kernels import KernelInputs, resolve_dtype, select_kernel
    from ring_backends.ring.rendezvous import START_TIMEOUT, join_world

    here = select_device(device)
    resolved = resolve_dtype(dtype, here)
    shared = here.type != "cuda"
    transport = "gloo" if shared else "nccl"
    join_world(transport, START_TIMEOUT)
    ranks = dist.get_world_size()
    probe = RankProbe(here, resolved, head_dim, _SECONDS, range(ranks))
    hardware = probe.measure(alone_threads=threads_alone if shared else None)
    memory = available_memory_bytes(here) // (ranks if shared else 1)
    found = {
        "transport": transport,
        "device": device_name(here),
        "device_type": here.type,
        "dtype": str(resolved).removeprefix("torch."),
        "head_dim": head_dim,
        "kernel": select_kernel("auto", KernelInputs(here, resolved, head_dim)).name,
        "latency_seconds": probe.hop_seconds(SMALL_HOP_BYTES, 21),
        "torch": str(torch.__version__),
        "hardware": dataclasses.replace(hardware, memory_bytes=memory),
    }
    dist.destroy_process_group()
    return found


def read(path: Path, dtype: str) -> dict[str, Any]:
    """Read the measurement that ``ring-backends info --probe --json`` wrote.

    Args:
        dtype: the expected dtype, by torch's name, such as ``"float32"``.

    Raises:
        ValueError: the file holds no measurement, or a measurement in another dtype.
    """
    advice = f"write a new one with `ring-backends info --probe --dtype {dtype} --json {path}`."
    try:
        probe = json.loads(path.read_text())["probe"]
        Hardware.of(probe["hardware"])
        measured, _ = str(probe["dtype"]), str(probe["device_type"])
    except (KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"probe = {str(path)!r}: holds no constants ({type(error).__name__}: {error}); {advice}"
        ) from error
    if measured != dtype:
        raise ValueError(f"probe = {str(path)!r}: was measured in {measured}, not in {dtype}; {advice}")
    return dict(probe)
