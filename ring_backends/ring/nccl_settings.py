"""The settings of NCCL and torch that matter to a ring: this package's defaults, the values in force, and advice.

NCCL reads a variable once per process. It reads :data:`LAUNCH_ORDER` at its first operation, and the other settings of
this module when it makes the first communicator. Where the environment has no value, NCCL takes the one of its files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from ring_backends.ring.launch import environment_variables
from ring_backends.ring.stream_hops import waits_block_host


@dataclass(frozen=True)
class Setting:
    """An environment variable of NCCL or torch.

    Attributes:
        default: the value without the variable; "auto" if NCCL chooses it for the machine.
        effect: what it does.
        ours: the value that this package sets unless somebody has chosen one; None if it sets none.
        earlier_name: another name by which torch reads it.
    """

    name: str
    default: str
    effect: str
    ours: str | None = None
    earlier_name: str | None = None

    @property
    def reader(self) -> str:
        return "NCCL" if self.name.startswith("NCCL_") else "torch"

    def chosen(self) -> tuple[str, str] | None:
        """The value that somebody has chosen, and where: "environment" or a file's path. None: nobody has."""
        for name in filter(None, (self.name, self.earlier_name)):
            if name in os.environ:
                return os.environ[name], "environment"
        files = _files() if self.reader == "NCCL" else ()
        return next(((value, str(file)) for file in files for name, value in _values(file) if name == self.name), None)

    def in_force(self) -> tuple[str, str]:
        """The value that a ring made by this process has, and where it comes from."""
        return self.chosen() or ((self.default, f"{self.reader}'s default") if self.ours is None else (self.ours, OURS))


OURS = "this package's default"
"""Where a value comes from that this package sets."""

LAUNCH_ORDER = Setting(
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "0",
    "1: operations of all communicators of a GPU start in the order in which the host posts them",
    ours=None if torch.version.hip else "1",  # with RCCL, processes have crashed
)
NET_CHANNELS = Setting("NCCL_NCHANNELS_PER_NET_PEER", "auto", "channels per peer in a ring over several hosts")
MAX_CHANNELS = Setting(
    "NCCL_MAX_P2P_NCHANNELS", "64", "most channels of send and receive; one takes 12 MiB of GPU memory per NVLink peer"
)
ERROR_HANDLING = Setting(
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "3",
    "what torch's watchdog does after an error of the ring's group; 2: abort it, 3: end the process",
    ours="2",
    earlier_name="NCCL_ASYNC_ERROR_HANDLING",
)
DUMP = Setting(
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "1: after an error, write the last operations to a file, and end", ours="0"
)
BLOCKING_WAIT = Setting(
    "TORCH_NCCL_BLOCKING_WAIT", "0", "1: the host waits for every hop", earlier_name="NCCL_BLOCKING_WAIT"
)
DEBUG = Setting("TORCH_DISTRIBUTED_DEBUG", "OFF", "DETAIL: before each collective, the hosts of all ranks compare it")

SETTINGS = (
    LAUNCH_ORDER,
    NET_CHANNELS,
    MAX_CHANNELS,
    Setting("NCCL_MIN_P2P_NCHANNELS", "1", "fewest channels of send and receive"),
    Setting("NCCL_P2P_NVL_CHUNKSIZE", "524288", "bytes per step over NVLink; fewer spread a hop over more channels"),
    Setting("NCCL_MAX_CTAS", "auto", "most channels, and thus thread blocks, of each operation of all communicators"),
    Setting("NCCL_BUFFSIZE", "4194304", "bytes of a channel's main buffer"),
    Setting("NCCL_P2P_DISABLE", "0", "1: GPUs of one host exchange data through host memory"),
    ERROR_HANDLING,
    DUMP,
    BLOCKING_WAIT,
    Setting(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "number of operations that the flight recorder keeps; 0: none",
        earlier_name="TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    DEBUG,
)
"""The settings that ``ring-backends info`` shows."""


def order_launches() -> None:
    """Set :data:`LAUNCH_ORDER` for the rest of the process, unless somebody has chosen.

    A ring has a communicator of its own, whose hops run beside the collectives of a framework. NCCL promises that two
    communicators do not block each other only if their operations start in the same order on all ranks.
    """
    if LAUNCH_ORDER.ours is not None and LAUNCH_ORDER.chosen() is None:
        os.environ[LAUNCH_ORDER.name] = LAUNCH_ORDER.ours


def default_value(setting: Setting) -> contextlib.AbstractContextManager[None]:
    """Set a variable that torch reads when it makes a group, unless somebody has chosen."""
    assert setting.ours is not None
    return environment_variables({} if setting.chosen() else {setting.name: setting.ours})


def check_debug_level() -> None:
    """Refuse the debug level DETAIL with a release of torch whose groups then cannot be aborted.

    Raises:
        RuntimeError: the debug level is DETAIL, and torch is older than 2.12.
    """
    if get_debug_level() == DebugLevel.DETAIL and torch.__version__ < "2.12":
        raise RuntimeError(
            f"{DEBUG.name} = 'DETAIL': with it, torch {torch.__version__} wraps each process group, and the wrapper "
            "ignores aborts and refuses timeouts, so a ring could not end a hop when a peer is lost; set 'INFO' or "
            "'OFF', or install torch 2.12 or newer."
        )


def describe() -> dict[str, Any]:
    """NCCL's release, the settings in force, and advice for this machine, as plain values.

    ``{"release": None}`` if this build of torch has no NCCL.
    """
    if not dist.is_nccl_available():
        return {"release": None}
    columns = ("name", "value", "source", "effect")
    return {
        "release": ".".join(map(str, torch.cuda.nccl.version())),
        "settings": [dict(zip(columns, (x.name, *x.in_force(), x.effect), strict=True)) for x in SETTINGS],
        "advice": [{"setting": setting, "why": why} for setting, why in _advice()],
    }


def _advice() -> Iterator[tuple[str, str]]:
    """Settings to change on this machine, and why. docs/nccl.md says more about each."""
    if LAUNCH_ORDER.ours is not None and LAUNCH_ORDER.in_force()[0] != LAUNCH_ORDER.ours:
        yield f"{LAUNCH_ORDER.name}={LAUNCH_ORDER.ours}", "else hops and a framework's collectives may deadlock"
    if waits_block_host():
        yield f"{BLOCKING_WAIT.name}=0", "else the host queues no tiles while a hop is on its way"
    if DEBUG.in_force()[0].upper() == "DETAIL":
        yield f"{DEBUG.name}=OFF", "else the host waits for all ranks before each collective"
    if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1) and not MAX_CHANNELS.chosen():
        yield (
            f"{MAX_CHANNELS.name}=8",
            "if GPU memory is short: an NVLink peer then takes 96 MiB instead of up to 384 MiB; small hops get slower",
        )
    if torch.cuda.is_available() and not NET_CHANNELS.chosen():
        yield (
            f"{NET_CHANNELS.name}=8",
            "if a ring spans hosts with NVLink: else its NVLink hops use as few channels as the network; measure it",
        )


def _files() -> tuple[Path, ...]:
    """The files of settings that NCCL reads. The first one with a variable decides."""
    own = os.environ.get("NCCL_CONF_FILE") or "~/.nccl.conf"
    return Path(os.path.expanduser(own)), Path("/etc/nccl.conf")


def _values(file: Path) -> Iterator[tuple[str, str]]:
    """The variables of a file of settings and their values; none if there is no such file."""
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            name, separator, value = line.partition("=")
            if separator:  # the name in a comment begins with "#"
                yield name, value
