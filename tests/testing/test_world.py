"""The world of ranks: returned values, errors, and recovery after failures."""

from __future__ import annotations

import inspect
import os
import re
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from command_line import environment, output_of, run

from ring_backends.testing.marks import MORE_CASES, THOROUGH
from ring_backends.testing.world import RanksFailedError, World, on_every_rank


@dataclass
class Parcel:
    text: str


@pytest.fixture(scope="module")
def pair():
    with World(2, grace=1) as ranks:
        yield ranks


def rank_and_arguments(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def sum_over_ranks(value):
    total = torch.tensor(float(value) + dist.get_rank())
    dist.all_reduce(total)
    return total.item()


def tensors():
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    return {"strided": leaf.detach().T, "bf16": leaf.detach().bfloat16(), "grown": leaf * 2, "leaf": leaf}


def leave_the_others_waiting(rank):
    if dist.get_rank() == rank:
        raise ValueError("left before the barrier")
    dist.barrier()


def call_on_rank(rank, function, *args):
    if dist.get_rank() == rank:
        function(*args)


def test_results_come_back_by_rank(pair):
    assert pair.run(rank_and_arguments, 1, named=2) == [(0, (1,), {"named": 2}), (1, (1,), {"named": 2})]
    assert pair.run(sum_over_ranks, 2) == [5.0, 5.0]
    assert pair.run(rank_and_arguments, Parcel("x"), ranks=[1]) == [None, (1, (Parcel("x"),), {})]


@on_every_rank
def rank_is_not(number):
    assert dist.get_rank() != number, f"this is rank {number}"


def test_the_body_of_a_test_runs_on_every_rank(pair):
    rank_is_not(number=2, world=pair)
    for rank in (0, 1):
        with pytest.raises(RanksFailedError, match=f"on 1 of 2 ranks[\\s\\S]*this is rank {rank}"):
            rank_is_not(number=rank, world=pair)
    assert list(inspect.signature(rank_is_not).parameters) == ["number", "world"]


def test_tensors_are_returned_unchanged(pair):
    for result in pair.run(tensors):
        torch.testing.assert_close(result, tensors(), rtol=0, atol=0)
        assert [name for name, tensor in result.items() if tensor.requires_grad] == ["grown", "leaf"]


@THOROUGH
def test_an_error_shows_where_the_others_wait(pair):
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        pair.run(leave_the_others_waiting, 1)
    assert time.monotonic() - start < 30
    message = str(failure.value)
    assert "--- rank 0 no answer: within 1 s of the failure of rank 1" in message
    assert re.search(r"test_world.py\", line \d+ in leave_the_others_waiting", message)
    assert "ValueError: left before the barrier" in message
    assert "_call_by_reference" not in message
    assert pair.run(sum_over_ranks, 0) == [1.0, 1.0]


def test_a_hang_is_reported_with_stacks_and_the_next_call_has_new_ranks(pair):
    before = pair.run(os.getpid)
    with pytest.raises(RanksFailedError) as failure:
        pair.run(call_on_rank, 0, time.sleep, 600, timeout=0.5)
    message = str(failure.value)
    assert "--- rank 0 no answer: within 0.5 s" in message
    assert re.search(r"test_world.py\", line \d+ in call_on_rank", message)
    assert "--- rank 1 returned" in message
    after = pair.run(os.getpid)
    assert not set(before) & set(after)
    for process_id in before:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_a_death_is_reported_and_the_next_call_has_new_ranks(pair):
    returned, died = pair.run_collect(call_on_rank, 1, os.abort)
    assert returned.status == "returned"
    assert (died.status, died.message) == ("died", "was killed by SIGABRT")
    assert pair.run(sum_over_ranks, 0) == [1.0, 1.0]


STOP = signal.raise_signal, signal.SIGSTOP


@pytest.mark.parametrize("silent", [pytest.param([], marks=MORE_CASES), [0]], ids=["reported", "silent"])
def test_a_stopped_rank_is_reported_and_not_waited_for_if_it_is_meant_to_be_silent(pair, silent):
    pair.run(sum_over_ranks, 0)  # the first call is slow, because the ranks import this module
    start = time.monotonic()
    stopped, returned = pair.run_collect(call_on_rank, 0, *STOP, silent=silent, timeout=60 if silent else 0.5)
    assert (stopped.status, returned.status) == ("no answer", "returned")
    assert time.monotonic() - start < 30
    assert silent or "no stacks" in stopped.detail


KILLED = """
import os, signal, time
from ring_backends.testing.world import World

def hang(parent):
    print("hanging", flush=True)
    os.kill(parent, signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    World(1).run(hang, os.getpid())
"""


@MORE_CASES
def test_no_rank_outlives_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(KILLED)
    # The rank inherits the output pipe, so the output ends only when the rank ends.
    done = run([str(script)], tmp_path, environment(TMPDIR=str(tmp_path)), timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "hanging\n"


NAMED = """
from dataclasses import dataclass
from ring_backends.testing.world import World

@dataclass
class Parcel:
    text: str

def same(parcel):
    return parcel

def test_same():
    with World(1) as world:
        assert world.run(same, Parcel("x")) == [Parcel("x")]
"""


@MORE_CASES
def test_ranks_find_functions_of_modules_imported_by_pytest(tmp_path):
    folder = tmp_path / "checks" / "inner"
    folder.mkdir(parents=True)
    (folder / "test_named.py").write_text(NAMED)
    command = ["-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    output_of([*command, f"--rootdir={tmp_path}", str(folder)], tmp_path, timeout=120)
