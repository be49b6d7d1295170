"""The constants of the cost model, measured on local ranks for ``info --probe`` and ``plan``, or read from a file.

This module imports no torch; the ranks that it starts do.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ring_backends.cli.launch import launch, under_launcher
from ring_backends.cost.hardware import Hardware

HEAD_DIM = 64
SECONDS = 0.3
LATENCY_BYTES = 64 * 2**10
"""Of the hop that ``info`` shows beside those of the model."""


def measure(command: str, num_ranks: int, dtype: str, device: str, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    """Start some ranks on this machine, and let all of them measure at once.

    Returns:
        ``hardware``, the constants as :class:`Hardware` names them, of the slowest rank each; ``latency_seconds`` of a
        hop of 64 KiB and ``bytes_per_second`` at 16 MiB both ways; and how they were measured: ``ranks``,
        ``transport``, ``device``, ``dtype``, ``head_dim``, ``kernel``.

    Raises:
        ValueError: a launcher has started this process as one of several ranks.
    """
    if under_launcher():
        raise ValueError(
            f"nproc_per_node: a launcher has set WORLD_SIZE, but {command} starts the ranks that it measures on "
            "itself; run it without torchrun."
        )
    # What `launch` would give to a single rank, and what to each of these.
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    found = launch(_measure_rank, (dtype, device, head_dim, threads), num_ranks)
    return merged(found)


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One account of the ranks' measurements, the slowest of them for each number."""
    from ring_backends.cost.probe import slowest

    hardware = slowest([rank["hardware"] for rank in found])
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

    from ring_backends.cli.machine import Device
    from ring_backends.cost.probe import RankProbe, available_memory_bytes
    from ring_backends.kernels import KernelInputs, resolve_dtype, select_kernel
    from ring_backends.ring.rendezvous import START_TIMEOUT, join_world

    here = Device.of_this_rank(device)
    resolved = resolve_dtype(dtype, here.torch)
    shared = here.torch.type != "cuda"
    transport = "gloo" if shared else "nccl"
    join_world(transport, START_TIMEOUT)
    ranks = dist.get_world_size()
    probe = RankProbe(here.torch, resolved, head_dim, SECONDS, range(ranks))
    hardware = probe.measure(alone_threads=threads_alone if shared else None)
    memory = available_memory_bytes(here.torch) // (ranks if shared else 1)
    found = {
        "transport": transport,
        "device": here.name,
        "dtype": str(resolved).removeprefix("torch."),
        "head_dim": head_dim,
        "kernel": select_kernel("auto", KernelInputs(here.torch, resolved, head_dim)).name,
        "latency_seconds": probe.hop_seconds(LATENCY_BYTES, 21),
        "torch": str(torch.__version__),
        "hardware": dataclasses.replace(hardware, memory_bytes=memory),
    }
    dist.destroy_process_group()
    return found


def read(path: Path, dtype: str) -> dict[str, Any]:
    """What ``info --probe --json`` wrote.

    Args:
        dtype: of the tensors that the constants are wanted for, as torch writes it: ``"float32"``.

    Raises:
        ValueError: the file holds nothing of the kind, or another dtype's.
    """
    way_out = f"write it anew with `ring-backends info --probe --dtype {dtype} --json {path}`."
    try:
        probe = json.loads(path.read_text())["probe"]
        Hardware.of(probe["hardware"])
        measured = str(probe["dtype"])
    except (KeyError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise ValueError(
            f"probe = {str(path)!r}: holds no constants ({type(error).__name__}: {error}); {way_out}"
        ) from error
    if measured != dtype:
        raise ValueError(f"probe = {str(path)!r}: was measured in {measured}, and {dtype} is asked for; {way_out}")
    return dict(probe)


def rows(probe: dict[str, Any]) -> list[tuple[str, str]]:
    """The constants for a person to read: what, and how much."""
    hardware = Hardware.of(probe["hardware"])

    def rate(backward: bool, causal: bool) -> str:
        flops, keys = hardware.tile_rate(backward=backward, causal=causal)
        return f"{flops / 1e9:,.1f} GFLOP/s" + (f", a row as {keys:,.0f} keys more" if keys else "")

    shown = [
        ("latency of a hop", f"{hardware.latency_seconds * 1e3:.3f} ms"),
        ("bandwidth, both ways at once", f"{hardware.bytes_per_second / 1e9:.2f} GB/s per direction"),
        ("tile forward", rate(False, False)),
        ("tile backward", rate(True, False)),
        ("causal tile forward", rate(False, True)),
        ("causal tile backward", rate(True, True)),
    ]
    if hardware.copy_bytes_per_second is not None:
        shown.append(("gathering and merging rows", f"{hardware.copy_bytes_per_second / 1e9:.2f} GB/s"))
    shown.append(("of a hop, hidden by a tile", f"{hardware.overlap:.0%}"))
    shown.append(("one rank alone", f"{hardware.speed_alone:.2f} times as fast"))
    if hardware.memory_bytes is not None:
        shown.append(("memory per rank", f"{hardware.memory_bytes / 2**30:,.1f} GiB"))
    return shown
