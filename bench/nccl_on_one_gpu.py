"""Runs rings of several ranks over NCCL: on one GPU that they share, or with a GPU for each rank.

NCCL refuses two ranks on one GPU, unless it takes them for ranks on different hosts (NCCL_HOSTID). It then connects
them by sockets. This shows order, matching, waits, memory, deadlines and aborts of real NCCL. It does not show speed,
NVLink or concurrency.

Each part starts new processes, has a hard limit, and is followed by the next one even if it fails. The exit status is 1
if a part has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from nccl_parts import A_MOMENT, PARTS, Cuda, NotRunError, Part, StandIn
from report import Json, Row, table

from ring_backends.cli.output import print_table, wide_console, write_json
from ring_backends.releases import versions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SHARED_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_TUNER_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_MAX_P2P_NCHANNELS": "2",
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "1",
}
"""NCCL's settings for ranks that share a GPU, the same on every rank. The first two are essential."""

COMMANDS = ("compare", "probe")
AFTER_A_FAILURE = Cuda.timeout + A_MOMENT
"""Seconds in which the other ranks have to answer after one has failed."""

IPV6 = re.compile(
    r"(?<![\w:])(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|(?:[0-9a-fA-F]{1,4}:){1,6}(?::[0-9a-fA-F]{1,4}){1,6})(?![\w:])"
)
TRANSPORT = re.compile(r"\bvia ((?:P2P|SHM|NET)/\w+)")
SHOWN = 600
"""The longest text of an error. The last output of a rank without an answer may have three times as many characters."""


Parts = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run this part. May be given several times.")]
ShareGpu = Annotated[
    bool | None, typer.Option("--share-gpu/--gpu-per-rank", help="Default: a GPU per rank where there are enough.")
]


@app.command(help=__doc__)
def main(
    part: Parts = None,
    show: Annotated[bool, typer.Option("--list", help="Show the parts, and end.")] = False,
    json: Json = None,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="Simulate NCCL and the GPU, on the CPU.")] = False,
    share_gpu: ShareGpu = None,
    everything: Annotated[bool, typer.Option("--everything", help="Also run `compare` and `info --probe`.")] = False,
    rank_of: Annotated[str | None, typer.Option(hidden=True)] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    if rank_of is not None and report is not None:
        run_rank(PARTS[rank_of], report, stand_in)
    if show:
        rows = ((name, ", ".join(map(str, x.ranks)), f"{x.seconds:g}", x.about) for name, x in PARTS.items())
        print_table("Parts", ("part", "ranks", "limit in s", "what it runs"), rows)
        return
    for name in part or ():
        if name not in PARTS:
            raise typer.BadParameter(f"--part {name}: there is no such part; choose from {', '.join(PARTS)}.")
    num_gpus = 0 if stand_in else torch.cuda.device_count()
    if not stand_in and num_gpus == 0:
        raise typer.BadParameter("torch finds no GPU; --stand-in runs the parts that need none.")
    if everything and num_gpus == 1:
        raise typer.BadParameter("--everything needs several GPUs, and torch finds one; leave it out.")
    found: Row = {"parts": [], **releases(stand_in), "command": [re.sub(r"[^=\s]*/", "", word) for word in sys.argv]}
    for name in part or PARTS:
        for ranks in PARTS[name].ranks:
            shares = num_gpus < ranks if share_gpu is None else share_gpu
            print(f"{name} on {ranks} ranks", flush=True)
            row = run_part(name, PARTS[name], ranks, stand_in, shares)
            print(f"  {shown_result(row)} in {row['seconds']} s: {first_line(row)}", flush=True)
            found["parts"].append(row)
            save(json, found)
    if everything:
        found |= run_commands(max(2, num_gpus), stand_in)
        save(json, found)
    show_results(found)
    if any(row["passed"] is False for row in found["parts"]) or any("error" in found.get(x, {}) for x in COMMANDS):
        raise typer.Exit(1)


def releases(stand_in: bool) -> Row:
    """The releases and devices that the results depend on. None: there is none here."""
    installed, driver = versions(), Path("/proc/driver/nvidia/version")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "torch": installed["torch"],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "cuda": installed["cuda"],
        "driver": next(iter(re.findall(r"\s(\d+(?:\.\d+)+)\s", driver.read_text())), None) if driver.exists() else None,
        "device": "stand-in" if stand_in else ", ".join(sorted({f"{names.count(name)} × {name}" for name in names})),
        "ring_backends": installed["ring_backends"],
    }


def run_part(name: str, part: Part, ranks: int, stand_in: bool, shares: bool) -> Row:
    """Run a part in new processes, and return its row."""
    row: Row = {"name": name, "ranks": ranks, "passed": None, "seconds": 0.0, "transport": None}
    if part.package is not None and find_spec(part.package) is None:
        return row | {"saw": f"not run: {part.package} is not installed"}
    if part.needs_gpu and stand_in:
        return row | {"saw": "not run: needs a GPU"}
    start = time.monotonic()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        answers = ask_ranks(name, part, ranks, stand_in, shares, folder)
        logs = "".join(log.read_text(errors="replace") for log in folder.glob("nccl-*.log"))
    row["seconds"] = round(time.monotonic() - start, 1)
    row["transport"] = "stand-in" if stand_in else ", ".join(sorted(set(TRANSPORT.findall(logs)))) or None
    results = {answer["passed"] for answer in answers.values()}
    row["passed"] = False if False in results else None if None in results else True
    texts = {rank: answer["saw"] for rank, answer in sorted(answers.items())}
    row["saw"] = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    if len(set(texts.values())) == 1:
        row["saw"] = next(iter(texts.values()))
    if name == "communicator" and row["passed"] and not stand_in:
        if shares and row["transport"] != "NET/Socket":
            row |= {"passed": False, "saw": f"NCCL's log names {row['transport']}, not NET/Socket; {row['saw']}"}
        if row["transport"] is None:
            row |= {"passed": False, "saw": f"NCCL's log names no transport; {row['saw']}"}
    return row


def ask_ranks(name: str, part: Part, ranks: int, stand_in: bool, shares: bool, folder: Path) -> dict[int, Row]:
    """Start the ranks, and return their answers, except that of a rank that the part loses. No process outlives this.

    The ranks have a session of their own, so Ctrl-C reaches only this process, which then kills them.
    """
    limit = part.seconds * (3 if stand_in else 1)  # the processes compete for the cores
    command = [sys.executable, sys.argv[0], "--rank-of", name, *(["--stand-in"] if stand_in else [])]
    asked = [rank for rank in range(ranks) if rank != part.lost]
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(end_all, processes)
        port = stack.enter_context(free_port())
        for rank in range(ranks):
            log = stack.enter_context((folder / f"rank-{rank}.log").open("wb"))
            process = subprocess.Popen(
                [*command, "--report", str(folder / f"{rank}.json")],
                env={**os.environ, **environment(rank, ranks, port, stand_in, shares, folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            processes.append(process)
        wait_for_answers(processes, asked, limit, folder)
        answers = {rank: answer_of(rank, processes[rank], limit, folder) for rank in asked}
    for rank, answer in answers.items():
        if answer["passed"] is False:
            print(f"--- the last output of rank {rank} of {name}\n{last_lines(rank, folder)}", flush=True)
    return answers


def environment(rank: int, ranks: int, port: int, stand_in: bool, shares: bool, folder: Path) -> dict[str, str]:
    """The variables of one rank. Ranks that share a GPU are ranks of hosts with one GPU each."""
    found = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",  # some containers set 1, and trainings in fp32 are compared
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(folder / f"nccl-{rank}.log"),
    }
    if stand_in:
        return {**found, "CUDA_VISIBLE_DEVICES": ""}
    if shares:
        host = f"ring-{rank}"
        one_gpu = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": host, "RING_BACKENDS_HOST": host}
        return {**found, **one_gpu, **SHARED_GPU}
    return found


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A free port. A bound socket reserves it, and rank 0 can still listen on it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def wait_for_answers(
    processes: Sequence[subprocess.Popen[bytes]], asked: Sequence[int], limit: float, folder: Path
) -> None:
    """Wait until each rank has answered or ended. At the limit, let the others print their stacks.

    After the first failure, the others have the time that their ring gives them to raise.
    """
    end = time.monotonic() + limit
    while pending := [
        rank for rank in asked if not (folder / f"{rank}.json").exists() and processes[rank].poll() is None
    ]:
        if time.monotonic() > end:
            for rank in pending:
                processes[rank].send_signal(signal.SIGUSR1)
            time.sleep(1)
            return
        has_failed = any(json.loads(file.read_text())["passed"] is False for file in folder.glob("[0-9].json")) or any(
            processes[rank].poll() is not None for rank in asked
        )
        if has_failed:
            end = min(end, time.monotonic() + AFTER_A_FAILURE)
        time.sleep(0.1)


def answer_of(rank: int, process: subprocess.Popen[bytes], limit: float, folder: Path) -> Row:
    file, status = folder / f"{rank}.json", process.poll()
    if file.exists():
        answer: Row = json.loads(file.read_text())
        return answer
    saw = f"the process ended with status {status}"
    if status in (None, -signal.SIGUSR1):
        saw = f"no answer within {limit:g} s, or {AFTER_A_FAILURE:g} s after another rank has failed"
    return {"passed": False, "saw": f"{saw}; its last output:\n{last_lines(rank, folder)[-3 * SHOWN :]}"}


def last_lines(rank: int, folder: Path) -> str:
    return "\n".join((folder / f"rank-{rank}.log").read_text(errors="replace").splitlines()[-40:])


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the processes, stopped ones too."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def run_rank(part: Part, report: Path, stand_in: bool) -> None:
    """Run a part on this rank, write the answer, and wait to be killed, so that no rank misses another one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the process that has started this one
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    passed: bool | None = True
    try:
        saw = part.run(StandIn() if stand_in else Cuda())
    except NotRunError as reason:
        passed, saw = None, f"not run: {reason}"
    except Exception as error:
        traceback.print_exc()
        passed, saw = False, f"{type(error).__name__}: {error}"[:SHOWN]
    unfinished = report.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"passed": passed, "saw": saw}))
    unfinished.rename(report)
    sys.stderr.flush()
    while True:
        signal.pause()


def run_commands(ranks: int, stand_in: bool) -> Row:
    """What `ring-backends compare` and `ring-backends info --probe` measure, or their errors."""
    smaller = ["--seq-len", "1024", "--device", "cpu", "--repeats", "1"] if stand_in else ["--seq-len", "131072"]
    commands = {
        "compare": ["compare", "--dtype", "fp32" if stand_in else "bf16", *smaller],
        "probe": ["info", "--probe", *(["--device", "cpu"] if stand_in else [])],
    }
    found: Row = {}
    for name, command in commands.items():
        print(f"ring-backends {' '.join(command)}", flush=True)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            options = ["--nproc-per-node", str(ranks), "--json", str(file)]
            words = [sys.executable, "-m", "ring_backends", *command, *options]
            try:
                error = subprocess.run(words, capture_output=True, text=True, timeout=600).stderr[-SHOWN:]
            except subprocess.TimeoutExpired:
                error = "not done within 600 s"
            found[name] = json.loads(file.read_text()) if file.exists() else {"error": error}
    return found


def save(file: Path | None, found: Row) -> None:
    if file is not None:
        write_json(file, without_names(found))


def without_names(value: Any) -> Any:
    """The same value without folders, user names, host names and addresses in its texts."""
    if isinstance(value, dict):
        return {key: without_names(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_names(part) for part in value]
    if not isinstance(value, str):
        return value
    host = socket.gethostname()
    names = {str(Path.home()): "~", str(Path.cwd()): ".", host: "HOST", host.partition(".")[0]: "HOST"}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        names[getpass.getuser()] = "USER"
    for name in sorted(filter(None, names), key=len, reverse=True):
        value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", names[name], value)
    value = re.sub(r"([\"'])~?/[^\"'\n]*/", r"\1", value)  # folders in quotes, with spaces or without
    value = re.sub(r"(?<![\w.:/])~?/(?:[^\s/'\":,;()]+/)+", "", value)
    value = IPV6.sub("ADDRESS", value)
    return re.sub(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b", "ADDRESS", value)


def shown_result(row: Row) -> str:
    return {True: "passed", False: "FAILED", None: "not run"}[row["passed"]]


def first_line(row: Row) -> str:
    """What a part saw, without the last output of ranks, which has been printed."""
    return str(row["saw"]).partition("\n")[0]


def show_results(found: Row) -> None:
    named = ("torch", "nccl", "cuda", "driver", "device", "ring_backends")
    print(", ".join(f"{name} {found[name]}" for name in named if found[name]))
    shown = [row | {"passed": shown_result(row), "saw": first_line(row)} for row in found["parts"]]
    wide_console().print(table(shown))
    for name in COMMANDS:
        if name in found:
            print(f"{name}: {found[name].get('error', 'done')}")


if __name__ == "__main__":
    app()
