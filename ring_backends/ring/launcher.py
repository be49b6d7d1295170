"""Reads the environment variables of this process's launcher: torchrun, Slurm's srun, mpirun or a Kubernetes job.

torch.distributed and the frameworks read torchrun's variables, so those of Slurm and of MPI's launchers are translated
into these. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Values of MASTER_ADDR with which all ranks are on one host."""

_SLURM_NAMES = (
    *("PROCID", "LOCALID", "STEP_NODELIST", "STEP_NUM_NODES"),
    *("STEP_TASKS_PER_NODE", "JOB_ID", "STEP_ID", "NODEID"),
)
"""The variables that srun sets for each task, without SLURM_."""


class _MpiNames(NamedTuple):
    """The variables that a launcher of MPI programs sets for each process."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_MPI = (
    *(
        _MpiNames(*(f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
        for prefix in ("OMPI_COMM_WORLD", "JSM_NAMESPACE", "MV2_COMM_WORLD")
    ),
    _MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _MpiNames("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""Open MPI's mpirun; jsrun; MVAPICH's mpirun_rsh; Hydra, which is the mpiexec of MPICH and of Intel MPI; PALS."""
_MPI_RANKS = (*(names.rank for names in _MPI), "PMIX_RANK", "PALS_RANKID")
_MPI_JOBS = ("PMIX_NAMESPACE", "PALS_APID")
"""Variables with a name of the job, the same for all of its processes. Hydra and MVAPICH set none."""
_REMEDY = "start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."


def under_launcher() -> bool:
    """Return whether torchrun, srun, mpirun or a launcher with torchrun's variables started this process as a rank.

    True also if a launcher of MPI programs started it, and does not say how many processes there are.
    """
    return ("WORLD_SIZE" in os.environ and "RANK" in os.environ) or _translation() is not None


def complete_environment() -> int:
    """Set torchrun's variables if srun or mpirun started this process as one of several. Returns the size of the world.

    Variables that are set already keep their values. In a batch script, outside of srun, Slurm's variables describe the
    tasks that srun would start, so they do not count.

    Raises:
        ValueError: the launcher's variables are incomplete, or contradict each other.
    """
    translation = _translation()
    if "RANK" not in os.environ and translation is not None:
        for name, value in translation().items():
            os.environ.setdefault(name, value)
    nodes = os.environ.get("PET_NNODES", "1")
    if "WORLD_SIZE" not in os.environ and nodes != "1":
        raise ValueError(
            f"WORLD_SIZE is not set, but PET_NNODES = {nodes}: the job expects torchrun, which reads the variables "
            "PET_*; start the program with torchrun, without further options."
        )
    if "WORLD_SIZE" not in os.environ and "RANK" in os.environ:
        raise ValueError(f"RANK = {os.environ['RANK']}, but not set: WORLD_SIZE; {_REMEDY}")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE = {world_size}, but not set: {', '.join(missing)}; {_REMEDY}")
    per_node = os.environ.get("PET_NPROC_PER_NODE", "1")
    if "LOCAL_RANK" not in os.environ and per_node != "1":
        raise ValueError(
            f"PET_NPROC_PER_NODE = {per_node}, but LOCAL_RANK is not set: RANK then numbers the pods of the job, not "
            "its processes; start the program with torchrun, which reads the variables PET_*."
        )
    return world_size


def local_world_size() -> int:
    """The number of ranks on this host, from LOCAL_WORLD_SIZE.

    Kubernetes' PyTorchJob sets neither this variable nor LOCAL_RANK. Each of its ranks is alone in a pod.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    is_alone = "LOCAL_RANK" not in os.environ and os.environ.get("MASTER_ADDR", "localhost") not in LOOPBACK
    return 1 if is_alone else int(os.environ.get("WORLD_SIZE", "1"))


def check_visible_gpus(count: int) -> None:
    """Refuse tasks of srun of which each sees only its own GPU, since LOCAL_RANK is then not the index of a GPU.

    Args:
        count: the number of GPUs that this process sees.

    Raises:
        ValueError: Slurm has bound GPUs to tasks.
    """
    per_task = os.environ.get("SLURM_GPUS_PER_TASK")
    if per_task is not None and _slurm_tasks() > 1 and 0 < count < local_world_size():
        raise ValueError(
            f"SLURM_GPUS_PER_TASK = {per_task}: this task sees {count} of the GPUs of its node, which has "
            f"{local_world_size()} tasks; start them with srun --gpu-bind=none, so that every task sees all GPUs."
        )


def _slurm_tasks() -> int:
    """The number of tasks of the step that srun started, with this process among them; 0 outside of srun."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "0"))


def _translation() -> Callable[[], dict[str, str]] | None:
    """What translates the variables of the innermost launcher; None if no launcher started several processes.

    ``srun --mpi=…`` also sets MPI's variables, with srun's rank and size, or PMIX_RANK alone. In an allocation of
    Slurm, mpirun and Hydra start their daemons with srun. Their processes inherit the variables of a daemon's task,
    which has another rank or belongs to a step of another size.
    """
    tasks, names = _slurm_tasks(), _mpi_names()
    size = 0 if names is None else int(os.environ[names.size])
    if names is not None and size > 1:
        is_of_srun = size == tasks and os.environ.get(names.rank) == os.environ.get("SLURM_PROCID")
        if not is_of_srun:
            return partial(_from_mpi, names)
    if tasks > 1:
        return _from_slurm
    is_of_mpi = any(name in os.environ for name in _MPI_RANKS)
    return _refuse_unknown_size if names is None and tasks == 0 and is_of_mpi else None


def _mpi_names() -> _MpiNames | None:
    """The variables of MPI's launcher, all of which are set if possible; None if no size is set."""
    with_size = [names for names in _MPI if names.size in os.environ]
    return max(with_size, key=lambda names: names.local_rank in os.environ, default=None)


def _from_mpi(names: _MpiNames) -> dict[str, str]:
    """torchrun's variables, from those that a launcher of MPI programs sets for each process."""
    size = os.environ[names.size]
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{names.size} = {size}, but not set: {', '.join(missing)}; pass all variables of the launcher to the "
            f"program, also into a container, or {_REMEDY}"
        )
    if os.environ.get("WORLD_SIZE", size) != size:
        raise ValueError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}, but {names.size} = {size}: unset WORLD_SIZE, or set RANK as "
            "well."
        )
    local_size = os.environ[names.local_size]
    address = {"MASTER_ADDR": "127.0.0.1"} if local_size == size else {}
    job = next((os.environ[name] for name in _MPI_JOBS if name in os.environ), None)
    port = {} if job is None else {"MASTER_PORT": _port(zlib.crc32(job.encode()))}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in {**os.environ, **address, **port}]
    if missing:
        here = "" if local_size == size else f" of which {local_size} are on this host,"
        values = {"MASTER_ADDR": "<host of rank 0>", "MASTER_PORT": "29500"}
        mpirun = " ".join(f"-x {name}={values[name]}" for name in missing)
        mpiexec = " ".join(f"-genv {name} {values[name]}" for name in missing)
        raise ValueError(
            f"{names.size} = {size},{here} but not set: {', '.join(missing)}; the launcher does not say where all "
            f"processes can meet, so add {mpirun} to mpirun (Open MPI), or {mpiexec} to mpiexec (MPICH)."
        )
    return {
        "RANK": os.environ[names.rank],
        "WORLD_SIZE": size,
        "LOCAL_RANK": os.environ[names.local_rank],
        "LOCAL_WORLD_SIZE": local_size,
        **address,
        **port,
    }


def _refuse_unknown_size() -> dict[str, str]:
    name = next(name for name in _MPI_RANKS if name in os.environ)
    raise ValueError(
        f"{name} = {os.environ[name]}: a launcher of MPI programs has started this process, and does not say how many "
        "there are; set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or RANK=0 and WORLD_SIZE=1 for a "
        "process alone."
    )


def _port(number: int) -> str:
    """A port that follows from the number of a job. Linux takes ports of outgoing connections from 32768 on."""
    return str(15000 + number % 15000)


def _from_slurm() -> dict[str, str]:
    """torchrun's variables, from those that srun sets for each task."""
    missing = [f"SLURM_{name}" for name in _SLURM_NAMES if f"SLURM_{name}" not in os.environ]
    tasks = _slurm_tasks()
    if missing:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS = {tasks}, but not set: {', '.join(missing)}; pass all variables SLURM_* to the "
            f"program, also into a container, or {_REMEDY}"
        )
    world_size = os.environ.get("WORLD_SIZE", str(tasks))
    if world_size != str(tasks):
        raise ValueError(
            f"WORLD_SIZE = {world_size}, but srun has started {tasks} tasks: unset WORLD_SIZE, or start {world_size} "
            "tasks, or set RANK as well."
        )
    rank, local_rank, nodes, num_nodes, tasks_per_node, job, step, node = (
        os.environ[f"SLURM_{name}"] for name in _SLURM_NAMES
    )
    return {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(tasks_per_node)[int(node)]),
        "MASTER_ADDR": "127.0.0.1" if num_nodes == "1" else _first_node(nodes),
        # The same on all tasks of a step, and different for most steps that run at the same time.
        "MASTER_PORT": _port(31 * int(job) + int(step)),
    }


def _first_node(nodes: str) -> str:
    """The first name of a list of nodes: rack1-node03 of ``rack[1-2]-node[03-05,09],login1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(counts: str) -> list[int]:
    """The number of tasks of each node: [2, 2, 1] of ``2(x2),1``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]
