"""What ``initialize`` reads from the environment variables of torchrun, Slurm and Kubernetes.

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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_"))}
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


def test_a_step_on_one_node_uses_the_loopback_interface():
    os.environ.update(SRUN)
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu11", "SLURM_STEP_TASKS_PER_NODE": "5"}
    found = completed(**one_node, SLURM_NODEID="0")
    assert (found["MASTER_ADDR"], found["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "5")


def test_variables_that_are_set_keep_their_values():
    found = completed(**SRUN, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500", WORLD_SIZE="5")
    assert found == {"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_torchrun_within_srun_keeps_its_variables():
    torchrun = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "1234", "LOCAL_RANK": "1"}
    assert completed(**SRUN, **torchrun) == {}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        # A batch script, outside of srun.
        {"SLURM_JOB_ID": "41", "SLURM_NTASKS": "5", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["no launcher", "batch script", "one task"],
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


@pytest.mark.parametrize(("node", "tasks"), [(0, "2"), (1, "2"), (2, "1")])
def test_tasks_of_a_node(node, tasks):
    assert completed(**SRUN | {"SLURM_NODEID": str(node)})["LOCAL_WORLD_SIZE"] == tasks


def test_steps_at_the_same_time_have_different_ports():
    ports = set()
    for job in range(5_000_000, 5_000_010):
        for step in range(10):
            with mock.patch.dict(os.environ):
                ports.add(completed(**SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"])
    assert len(ports) == 100
    assert all(15000 <= int(port) < 30000 for port in ports)


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
