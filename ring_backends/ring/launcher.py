"""Reads what the launcher of this process says in environment variables: torchrun, Slurm's srun or a Kubernetes job.

torch.distributed and the frameworks read torchrun's variables, so Slurm's are translated into these. This module does
not import torch.
"""

from __future__ import annotations

import os
import re

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Values of MASTER_ADDR with which all ranks are on one host."""

_SLURM_NAMES = (
    *("PROCID", "LOCALID", "STEP_NODELIST", "STEP_NUM_NODES"),
    *("STEP_TASKS_PER_NODE", "JOB_ID", "STEP_ID", "NODEID"),
)
"""The variables that srun sets for each task, without SLURM_."""
_REMEDY = "start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."


def under_launcher() -> bool:
    """Return whether torchrun, srun or a launcher that sets torchrun's variables started this process as a rank."""
    return ("WORLD_SIZE" in os.environ and "RANK" in os.environ) or _slurm_tasks() > 1


def complete_environment() -> int:
    """Set torchrun's variables if srun started this process as one of several tasks. Returns the size of the world.

    Variables that are set already keep their values. In a batch script, outside of srun, Slurm's variables describe the
    tasks that srun would start, so they do not count.

    Raises:
        ValueError: the launcher's variables are incomplete, or contradict each other.
    """
    if "RANK" not in os.environ and _slurm_tasks() > 1:
        for name, value in _from_slurm().items():
            os.environ.setdefault(name, value)
    nodes = os.environ.get("PET_NNODES", "1")
    if "WORLD_SIZE" not in os.environ and nodes != "1":
        raise ValueError(
            f"WORLD_SIZE is not set, but PET_NNODES = {nodes}: the job expects torchrun, which reads the variables "
            "PET_*; start the program with torchrun, without further options."
        )
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
        # The same on all tasks of a step, and different for most steps that run at the same time. Linux takes ports of
        # outgoing connections from 32768 on.
        "MASTER_PORT": str(15000 + (31 * int(job) + int(step)) % 15000),
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
