"""What ``initialize`` reads from the environment variables of torchrun, Slurm, MPI's launchers and Kubernetes.

tests/ring/test_clusters.py starts ranks with the launchers themselves.
"""

from __future__ import annotations

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch

from ring_backends.adapters import native
from ring_backends.ring import launcher
from ring_backends.ring.rendezvous import start_world

SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}
"""What srun sets for the last of five tasks on three nodes."""

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "424411137",
}
"""What Open MPI's mpirun sets for the second of two processes on one host."""

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
"""What the mpiexec of MPICH and Intel MPI sets for the second of two processes on one host."""

PALS = {
    **{"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
    **{"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_APID": "9a04c0f1-3b0f"},
}
"""What the mpiexec of PALS sets for the sixth of eight processes, the second one on its host."""

JSRUN = {
    **{f"JSM_NAMESPACE_{name}": MPIRUN[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")},
    **{"JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1"},
}
"""What jsrun sets for the second of two processes on one host, without its copies in Open MPI's variables."""

MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}
MVAPICH |= {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"}

POD = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PYTHONUNBUFFERED": "1",
    "RANK": "3",
    "WORLD_SIZE": "4",
}
"""What Kubeflow's training operator sets for the last of four replicas of a PyTorchJob."""


@pytest.fixture(autouse=True)
def no_launcher():
    launchers = ("SLURM_", "PET_", "OMPI_", "JSM_", "MV2_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def completed(**variables: str) -> dict[str, str]:
    """The variables that are set in this environment."""
    os.environ.update(variables)
    before = dict(os.environ)
    assert launcher.complete_environment() == int(os.environ.get("WORLD_SIZE", "1"))
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def test_a_task_of_srun_gets_the_variables_of_torchrun():
    assert not launcher.under_launcher()
    assert completed(**SRUN) == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "16273",  # 15000 + 31 · 41 + 2
    }
    assert launcher.under_launcher()
    assert completed() == {}


@pytest.mark.parametrize("outer", [SRUN, MPIRUN, HYDRA, {"PMIX_RANK": "1"}])
def test_torchrun_within_another_launcher_keeps_its_variables(outer):
    torchrun = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "1234", "LOCAL_RANK": "1"}
    assert completed(**outer, **torchrun) == {}


SECOND_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        (MPIRUN, "28184"),  # 15000 + crc32(b"424411137") % 15000
        (JSRUN, "19583"),
        ({**JSRUN, **MPIRUN, "PMIX_NAMESPACE": "1"}, "19583"),
        ({**HYDRA, "MASTER_PORT": "29500"}, None),
        ({**MVAPICH, "MASTER_PORT": "29500"}, None),
    ],
    ids=["mpirun", "jsrun", "jsrun with Open MPI's variables", "hydra", "mvapich"],
)
def test_a_process_of_mpi_gets_the_variables_of_torchrun(variables, port):
    found = completed(**variables)
    assert found == {**SECOND_OF_TWO, "MASTER_ADDR": "127.0.0.1", **({"MASTER_PORT": port} if port else {})}
    assert launcher.under_launcher()
    assert completed() == {}


def test_processes_of_mpi_on_several_hosts():
    """The launcher does not say where rank 0 is."""
    found = completed(**PALS, MASTER_ADDR="node7")
    assert found.pop("MASTER_PORT") == "19093"
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_mpi_within_slurm():
    """``srun --mpi=…`` sets MPI's variables as well. mpirun and Hydra start their daemons by srun."""
    rank, size = SRUN["SLURM_PROCID"], SRUN["SLURM_STEP_NUM_TASKS"]
    for of_srun in ({"PMIX_RANK": rank}, {"PMI_RANK": rank, "PMI_SIZE": size}):
        with mock.patch.dict(os.environ):
            assert completed(**SRUN, **of_srun)["MASTER_ADDR"] == "gpu07"
    alone = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}
    with mock.patch.dict(os.environ):
        assert completed(**alone) == {}
    for by_daemon in (MPIRUN, {**HYDRA, "MASTER_PORT": "29500"}):
        with mock.patch.dict(os.environ):
            found = completed(**SRUN, **by_daemon)
            assert {name: found[name] for name in SECOND_OF_TWO} == SECOND_OF_TWO


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # A batch script, outside of srun.
        {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {**HYDRA, "PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
    ids=["no launcher", "batch script", "one task", "one process of mpirun", "one process of hydra"],
)
def test_a_process_alone(variables):
    assert completed(**variables) == {}
    assert not launcher.under_launcher()
    assert start_world(timedelta(seconds=60)) == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("node1,node2", "node1"),
        ("node[01-04,07]", "node01"),
        ("node[7,9-12]-ib,login", "node7-ib"),
        ("rack[1-2]-node[03-05,09],login1", "rack1-node03"),
        ("a-b.example,c[1-2]", "a-b.example"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert completed(**SRUN | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"},
            r"SLURM_STEP_NUM_TASKS = 5, but not set: SLURM_STEP_NODELIST; pass all variables SLURM_\*",
        ),
        ({**SRUN, "WORLD_SIZE": "4"}, "WORLD_SIZE = 4, but srun has started 5 tasks: unset WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2, but not set: RANK, MASTER_ADDR, MASTER_PORT; start .* torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "WORLD_SIZE = 2, but not set: MASTER_PORT"),
        ({"RANK": "1"}, "RANK = 1, but not set: WORLD_SIZE; start .* torchrun"),
        ({**MPIRUN, "RANK": "1"}, "RANK = 1, but not set: WORLD_SIZE"),
        ({**MPIRUN, "WORLD_SIZE": "1"}, "WORLD_SIZE = 1, but OMPI_COMM_WORLD_SIZE = 2: unset WORLD_SIZE"),
        (
            {name: value for name, value in MPIRUN.items() if name != "OMPI_COMM_WORLD_LOCAL_RANK"},
            "OMPI_COMM_WORLD_SIZE = 2, but not set: OMPI_COMM_WORLD_LOCAL_RANK; pass all variables",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_SIZE = 2, but not set: MPI_LOCALRANKID, MPI_LOCALNRANKS"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK = 0: .* does not say how many there are; .* WORLD_SIZE, LOCAL_RANK"),
        ({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "3"}, "PALS_RANKID = 3: .* does not say how many"),
        (HYDRA, "PMI_SIZE = 2, but not set: MASTER_PORT; .* -genv MASTER_PORT 29500 to mpiexec"),
        (PALS, "PMI_SIZE = 8, of which 4 are on this host, but not set: MASTER_ADDR; .* -x MASTER_ADDR=<host"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "WORLD_SIZE is not set, but PET_NNODES = 2: .* torchrun"),
        ({"PET_NNODES": "1:4"}, "WORLD_SIZE is not set, but PET_NNODES = 1:4"),
        (
            {**POD, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "2"},
            "PET_NPROC_PER_NODE = 2, but LOCAL_RANK is not set: .* torchrun",
        ),
    ],
)
def test_incomplete_variables_are_refused(variables, message):
    os.environ.update(variables)
    with pytest.raises(ValueError, match=message):
        native.initialize()


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({}, 1),
        (POD, 1),
        ({**POD, "MASTER_ADDR": "localhost"}, 4),  # four ranks that the user started on one host
        ({**POD, "LOCAL_RANK": "0"}, 4),
        ({**POD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_ranks_of_this_host(variables, local):
    os.environ.update(variables)
    assert launcher.local_world_size() == local


def test_a_pod_with_one_gpu_uses_nccl():
    """Four pods with one GPU each. LOCAL_WORLD_SIZE is not set, and must not be taken for 4."""
    os.environ.update(POD)
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.distributed, "is_nccl_available", return_value=True),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch("ring_backends.ring.rendezvous.join_world") as join_world,
        mock.patch.object(torch.distributed, "get_world_size", return_value=4),
    ):
        assert start_world(timedelta(seconds=60)) == 4
    set_device.assert_called_once_with(0)
    assert join_world.call_args.args[0] == "cpu:gloo,cuda:nccl"


def test_gpus_that_slurm_binds_to_tasks_are_refused():
    os.environ.update(SRUN | {"SLURM_NODEID": "0"}, SLURM_GPUS_PER_TASK="1")
    launcher.complete_environment()
    launcher.check_visible_gpus(0)
    launcher.check_visible_gpus(2)
    with pytest.raises(ValueError, match=r"SLURM_GPUS_PER_TASK = 1: this task sees 1 .* srun --gpu-bind=none"):
        launcher.check_visible_gpus(1)
