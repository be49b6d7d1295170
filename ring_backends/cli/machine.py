"""What a command has to know about the machine: this rank's device, its memory, versions, the adapters."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ring_backends import __version__

FRAMEWORKS = ("deepspeed", "fairscale")


@dataclass(frozen=True)
class Device:
    """The device of one rank."""

    torch: torch.device
    name: str

    @classmethod
    def of_this_rank(cls, wanted: str) -> Device:
        """``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU of its own for every local rank where there are enough.

        Raises:
            ValueError: CUDA is asked for and there are fewer GPUs than local ranks.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count()
        if wanted == "cuda" and gpus < local_ranks:
            raise ValueError(
                f"device = 'cuda': {local_ranks} rank(s) on this machine and {gpus} GPU(s) that torch sees; start "
                f"at most {gpus}, or use --device cpu."
            )
        if wanted == "cpu" or gpus < local_ranks:
            threads = torch.get_num_threads()
            return cls(torch.device("cpu"), f"CPU with {threads} thread{'s' if threads > 1 else ''} per rank")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return cls(device, torch.cuda.get_device_name(device))


def peak_memory_bytes(device: Device) -> int:
    """The most this process has held: allocated on its GPU, or resident in main memory on the CPU."""
    if device.torch.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device.torch))
    with contextlib.suppress(OSError):
        # Linux' ru_maxrss begins at the size of the process that started this one; VmHWM is its own.
        status = Path("/proc/self/status").read_text()
        if own := re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE):
            return int(own[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str | None]:
    """Of everything that can change a result; None where it is not installed."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "ring_backends": __version__,
    }
    for name in FRAMEWORKS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
