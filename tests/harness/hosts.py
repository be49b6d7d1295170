"""Several hosts on one machine, as network namespaces whose packets this process forwards.

Each host has a TUN device. A thread of this process reads its packets. It can delay, reorder, lose or drop them. This
replaces netem, which not every kernel has. It needs Linux, root, and the commands ``ip`` and ``tc``.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ring_backends.ring.topology import HOST_VARIABLE
from ring_backends.testing.world import process_context

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")  # where `ip netns add` makes them
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_PORT = "29517"  # of the store on the first host
_SEEN = itertools.count()


class NoHostsError(RuntimeError):
    """This machine cannot create network namespaces. The message has the reason."""


class Hosts:
    """``count`` hosts. The context manager ends their processes on exit.

    Attributes:
        delay: seconds by which every packet is delayed.
        jitter: upper bound in seconds of an additional random delay, which changes the order of packets.
        loss: the fraction of packets that are lost.
        cut: hosts that neither send nor receive packets.

    Args:
        preload: dotted names of modules that the server imports from which processes are forked.
    """

    def __init__(self, count: int, preload: Sequence[str] = ()) -> None:
        self.names = [f"ring{os.getpid()}x{next(_SEEN)}" for _ in range(count)]
        self.delay, self.jitter, self.loss = 0.0, 0.0, 0.0
        self.cut: set[int] = set()
        self._preload = tuple(preload)
        self._files: list[int] = []
        self._processes: list[tuple[int, BaseProcess]] = []
        self._ended = threading.Event()
        self._carrier = threading.Thread(target=self._carry, name="network", daemon=True)

    def address(self, host: int) -> str:
        return f"10.232.0.{1 + host}"

    def disturb(self, rate: str, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0) -> None:
        """Set delay, jitter and loss, and limit the sending rate of every host, such as to ``"20mbit"``, as tc says."""
        self.delay, self.jitter, self.loss = delay, jitter, loss
        for host in self.names:
            _run(f"tc -n {host} qdisc replace dev {host} root tbf rate {rate} burst 32kb latency 400ms")

    def call(
        self, host: int, function: Callable[..., None], args: Sequence[Any], environment: Mapping[str, str], log: Path
    ) -> BaseProcess:
        """Call a function on a host in a new process. Its output goes to ``log``."""
        settings = {**self._environment(host), **environment}
        process = process_context(self._preload).Process(
            target=_call_in_namespace, args=(self.names[host], settings, log, function, *args), daemon=True
        )
        process.start()
        self._processes.append((host, process))
        return process

    def call_ranks(
        self, function: Callable[..., None], args: Sequence[Any], folder: Path, *, per_host: int = 1
    ) -> list[BaseProcess]:
        """Call a function on ``per_host`` ranks of each host, with the variables of torchrun. Ranks go host by host.

        The output of a rank goes to ``folder/RANK.log``.
        """
        size = per_host * len(self.names)
        shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_host)}
        shared |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": _PORT}
        processes = []
        for rank in range(size):
            host, local_rank = divmod(rank, per_host)
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            processes.append(self.call(host, function, args, {**shared, **of_rank}, folder / f"{rank}.log"))
        return processes

    def _environment(self, host: int) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": self.names[host], HOST_VARIABLE: self.names[host]}

    def lose(self, host: int) -> None:
        """Cut the links of a host and kill its processes. Peers do not see their connections close."""
        self.cut.add(host)
        for where, process in self._processes:
            if where == host:
                _kill(process)

    def __enter__(self) -> Hosts:
        needed = {
            "Linux": sys.platform == "linux",
            "root": hasattr(os, "geteuid") and os.geteuid() == 0,
            **{f"the command {name} (iproute2)": shutil.which(name) is not None for name in ("ip", "tc")},
            "/dev/net/tun": Path("/dev/net/tun").exists(),
        }
        missing = [what for what, is_there in needed.items() if not is_there]
        if missing:
            raise NoHostsError(f"hosts are network namespaces; this machine lacks {missing[0]}.")
        try:
            for host, name in enumerate(self.names):
                _run(f"ip netns add {name}")
                file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                self._files.append(file)
                fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
                _run(f"ip link set {name} netns {name}")
                _run(f"ip -n {name} addr add {self.address(host)}/24 dev {name}")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set {name} mtu {_MTU} up")
        except OSError as error:
            self._leave()
            raise NoHostsError(f"a TUN device cannot be created: {error}.") from error
        except BaseException:
            self._leave()
            raise
        self._carrier.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for _, process in self._processes:
            _kill(process)
        self._ended.set()
        if self._carrier.is_alive():
            self._carrier.join()
        for file in self._files:
            os.close(file)
        self._files.clear()
        for name in self.names:  # this also deletes its device
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)

    def _carry(self) -> None:
        by_address = {bytes(map(int, self.address(host).split("."))): host for host in range(len(self.names))}
        chance, order = random.Random(0), itertools.count()
        under_way: list[tuple[float, int, int, bytes]] = []
        with selectors.DefaultSelector() as selector:
            for host, file in enumerate(self._files):
                selector.register(file, selectors.EVENT_READ, host)
            while not self._ended.is_set():
                wait = under_way[0][0] - time.monotonic() if under_way else 0.1
                for key, _ in selector.select(min(0.1, max(0.0, wait))):
                    packet = _read(key.fd)
                    to = by_address.get(packet[16:20]) if packet[:1] and packet[0] >> 4 == 4 else None
                    if to is None or {key.data, to} & self.cut or chance.random() < self.loss:
                        continue
                    due = time.monotonic() + self.delay + self.jitter * chance.random()
                    heapq.heappush(under_way, (due, next(order), to, packet))
                while under_way and under_way[0][0] <= time.monotonic():
                    _, _, to, packet = heapq.heappop(under_way)
                    if to not in self.cut:
                        _write(self._files[to], packet)


def _read(file: int) -> bytes:
    try:
        return os.read(file, _MTU + 100)
    except OSError:  # no packet, or the device is down
        return b""


def _write(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except OSError:  # drop the packet
        return


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoHostsError(f"{command}: {done.stderr.strip() or f'status {done.returncode}'}.")


def _call_in_namespace(
    name: str, environment: Mapping[str, str], log: Path, function: Callable[..., None], *args: Any
) -> None:
    with log.open("wb") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is in Python 3.12 and later
    with (_NAMESPACES / name).open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")
    os.environ.update(environment)
    function(*args)


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()
