"""A real Slurm cluster of one node, this machine, with its daemons, key and files in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")
_SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
_PATIENCE = 120.0  # seconds for a daemon to start

# There are more CPUs than cores, so that a step has the tasks that a test needs. KillWait and sched_interval shorten
# the time until a requeued job starts again.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=2
SchedulerParameters=sched_interval=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(RuntimeError):
    """Slurm cannot run here. The message has the reason."""


class SlurmCluster:
    """The daemons. The context manager stops them, and all jobs, on exit.

    Attributes:
        environment: variables with which Slurm's commands find the cluster.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}

    def __enter__(self) -> SlurmCluster:
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_SBIN) is None]
        if missing:
            raise NoSlurmError(f"{missing[0]} is not installed (Debian: slurm-wlm and munge).")
        if sys.platform != "linux" or os.geteuid() != 0:
            raise NoSlurmError("the daemons of Slurm need Linux and root.")
        # Not pytest's folder for temporary files: munged refuses a folder that others may write to, or cannot enter.
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/run"))
        self._folder.chmod(0o755)
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--user=root", "--full", "--signal=KILL")
            time.sleep(1)
        self._stop()

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands, which must succeed."""
        return subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    @property
    def log(self) -> str:
        """The end of what the controller has logged."""
        return (self._folder / "slurmctld.log").read_text(errors="replace")[-4000:]

    def _start(self) -> None:
        folder = self._folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        configuration = folder / "slurm.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                folder=folder,
                controller_port=_free_port(),
                node_port=_free_port(),
            )
        )
        self.environment = {"SLURM_CONF": str(configuration)}
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
        self._daemon("munged", "--foreground", *(f"--{name}={path}" for name, path in files.items()))
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", str(configuration))
        self._daemon("slurmd", "-D", "-f", str(configuration))
        self._wait(lambda: self.run("sinfo", "--noheader", "--format=%T") == "idle\n", "slurmctld and slurmd")

    def _daemon(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=_SBIN)
        assert path is not None
        with (self._folder / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [path, *arguments],
                    env={**os.environ, **self.environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait(self, is_ready: object, what: str) -> None:
        assert callable(is_ready)
        deadline = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(subprocess.SubprocessError):
                if is_ready():
                    return
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in self._folder.glob("*.out"))
                raise NoSlurmError(f"{what} did not start within {_PATIENCE:.0f} s:\n{logs}")
            time.sleep(0.2)

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
