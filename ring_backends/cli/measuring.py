"""Where a measurement begins and ends: the ranks meet, a GPU finishes, and the peak of the memory is forgotten."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from ring_backends.cli.machine import Device


def meet(device: Device) -> None:
    """Wait until all ranks of the world, if there are several, are here with nothing left to do."""
    finish(device)
    if dist.is_initialized():
        dist.barrier()
        finish(device)


def finish(device: Device) -> None:
    """Wait for what a GPU is still computing."""
    if device.torch.type == "cuda":
        torch.cuda.synchronize()


def forget_peak(device: Device) -> None:
    """From here on, :func:`~ring_backends.cli.machine.peak_memory_bytes` counts anew."""
    if device.torch.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # elsewhere than on Linux the peak so far is what the increase is counted from
        Path("/proc/self/clear_refs").write_text("5")
