"""Launches that are kept with a plan: each is used for tensors and options that are alike, and for no others.

Stand-ins take the place of the compiled kernels, so the tests need neither Triton nor a GPU. In the first launch of its
kind, Triton would look up the compiled kernel. In a later one, the compiled kernel is started with pointers.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
from ring_backends.engine.wire_buffers import RowFormat, SumPart, Sums, WireBuffer
from ring_backends.kernels import launch_records, triton_launch
from ring_backends.kernels import rows as dilated
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.launch_records import MAX_RECORDS, Record, Runtime, Source, launch
from ring_backends.kernels.rows import Rows
from ring_backends.kernels.steps import StepRows
from ring_backends.kernels.triton_launch import Launch
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import Tile
from ring_backends.schedule.rows import DilatedRows, HeadRun


@dataclass(eq=False)
class StandIn:
    """Stands for a kernel, and for what Triton compiles of it."""

    looked_up: list[tuple[Any, ...]] = field(default_factory=list)
    started: list[tuple[Any, ...]] = field(default_factory=list)
    function: str = "function"
    packed_metadata: str = "metadata"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look_up(*arguments: Any, **constants: Any) -> StandIn:
            options = {"num_warps", "num_stages", *launch_records.LAUNCH_OPTIONS}
            values = [value for name, value in constants.items() if name not in options]
            self.looked_up.append((*grid, *_pointers((*arguments, *values))))
            return self

        return look_up

    def run(self, *arguments: Any) -> None:
        grid, stream, loaded, arguments = arguments[:3], arguments[3], arguments[4:9], arguments[9:]
        assert stream == 7
        assert loaded == ("function", "metadata", None, None, None)
        self.started.append((*grid, *_pointers(arguments)))


def _pointers(value: Any) -> Any:
    """The arguments with plain tuples, and pointers for tensors."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return tuple(map(_pointers, value)) if isinstance(value, tuple) else value


NO_HOOKS = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    """The stand-in for all kernels."""
    kernel = StandIn()
    kernels = triton_launch.Kernels(*[kernel] * 6, is_interpreted=False)
    with (
        mock.patch.object(triton_launch, "kernels", return_value=kernels),
        mock.patch.object(triton_launch, "capability", return_value=(9, 0)),
        mock.patch.object(launch_records, "runtime", return_value=Runtime(lambda device: 7, NO_HOOKS)),
        mock.patch.object(dilated, "can_launch", return_value=True),
    ):
        yield kernel


def unaligned(tensor: Tensor) -> Tensor:
    """A copy whose pointer is not a multiple of 16 bytes."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return memory.copy_(tensor)


def other_strides(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


QUERY = torch.zeros(1, 64, 4, 16)
MARKS, DOCUMENTS = torch.zeros(1, 64, 4, dtype=torch.bool), torch.zeros(1, 64, 4, dtype=torch.int64)
WORDS = torch.zeros(1, 64, 4, dtype=torch.int32)
DROPPED = {"query_words": WORDS, "key_words": WORDS}
PLAIN = StepRows(QUERY, QUERY, QUERY, 0.5)
KINDS: dict[str, StepRows] = {
    "plain": PLAIN,
    "other strides": replace(PLAIN, query=other_strides(QUERY)),
    "other strides of values": replace(PLAIN, value=other_strides(QUERY)),
    "unaligned": replace(PLAIN, key=unaligned(QUERY)),
    "fp16": replace(PLAIN, query=QUERY.half(), key=QUERY.half(), value=QUERY.half()),
    "another batch": replace(PLAIN, query=torch.zeros(2, 64, 4, 16)),
    "other heads": replace(PLAIN, first_head=4),
    "key mask": replace(PLAIN, key_marks=MARKS),
    "documents": replace(PLAIN, key_marks=DOCUMENTS, query_documents=DOCUMENTS),
    "int32 documents": replace(PLAIN, key_marks=DOCUMENTS.int(), query_documents=DOCUMENTS.int()),
    "dropout": replace(PLAIN, dropout=Dropout(0.1, 64), **DROPPED),
    "more dropout": replace(PLAIN, dropout=Dropout(0.2, 64), **DROPPED),
}


def local_tiles() -> tuple[Tile, ...]:
    """The tiles of a plan without hops."""
    schedule = RingSchedule(DilatedPattern((32,), (2,)), SequenceLayout(64, 1), 4, 4, True)
    ((_, step),) = rank_plan(schedule, 0, batch=1, head_dim=16, itemsize=4, backward=False).steps
    return step.all_tiles


def test_a_launch_of_a_step_is_used_for_tensors_and_options_that_are_alike(stand_in: StandIn) -> None:
    tiles, out, lse = local_tiles(), torch.zeros(1, 64, 4, 16), torch.zeros(1, 64, 4)

    def attend(rows: StepRows) -> None:
        (of_step,) = Launch.of_step(tiles, rows, None, None)
        of_step.run("forward", (out, lse))

    for number, (name, rows) in enumerate(KINDS.items(), 1):
        attend(rows)
        assert len(stand_in.looked_up) == number, f"{name} was taken for another kind"
        assert len(stand_in.started) == number - 1
        attend(rows)
        assert len(stand_in.looked_up) == number, f"{name} was not found again"
        assert stand_in.started[-1] == stand_in.looked_up[-1], name
    assert len({*stand_in.started}) == len(KINDS)
    query = QUERY.clone()
    attend(replace(PLAIN, query=query, scale=0.25))  # the scale is an argument
    assert len(stand_in.looked_up) == len(KINDS)
    assert {query.data_ptr(), 0.25} <= {*flat(stand_in.started[-1])}
    query = unaligned(query)
    attend(replace(PLAIN, query=query, first_head=8))
    alive = weakref.ref(query)
    del query
    gc.collect()
    assert alive() is None, "the plan holds a tensor of a call"


def flat(value: Any) -> list[Any]:
    return [x for part in value for x in flat(part)] if isinstance(value, tuple) else [value]


def test_launches_of_rows_are_used_for_tensors_that_are_alike(stand_in: StandIn) -> None:
    rows = DilatedRows(0, 2, 32, 2, 16, (HeadRun(0, 0, inner=4, inner_head=1),))
    fewer = replace(rows, rows=8)
    tensor, values, lse = torch.zeros(1, 64, 4, 16), torch.zeros(2, 4, 16, 16), torch.zeros(1, 64, 4)
    few, spread = values[:, :, :8], torch.zeros(8192).as_strided(values.shape, tensor.stride())
    twice, sums = torch.zeros(2, 64, 4, 16), Sums((SumPart(0, 8, (0,)),))
    calls = [
        lambda: dilated.gather_many([Rows(tensor, rows, values)]),
        lambda: dilated.scatter_many([Rows(tensor, rows, values)]),
        lambda: dilated.scatter_many(added=[Rows(tensor, rows, values)]),
        lambda: dilated.add_rows([Rows(tensor, rows, tensor)]),
        lambda: dilated.add_rows([Rows(tensor, rows, tensor)], takes=True),
        lambda: dilated.scatter_many(added=[Rows(tensor, rows, spread)]),  # with the strides of the tensor
        lambda: dilated.gather_many([Rows(unaligned(tensor), rows, values)]),
        lambda: dilated.gather_many([Rows(other_strides(tensor), rows, values)]),
        lambda: dilated.gather_many([Rows(tensor.half(), rows, values)]),
        lambda: dilated.gather_many([Rows(twice, rows, twice.new_zeros(4, 4, 16, 16))]),
        lambda: dilated.gather_many([Rows(tensor, rows, values), Rows(tensor, rows, values)]),
        lambda: dilated.gather_many([Rows(tensor, rows, values), Rows(tensor, fewer, few)]),
        lambda: dilated.merge_rows(tensor, lse, rows, values, values[..., 0]),
        lambda: dilated.merge_rows(tensor, lse, rows, tensor, lse, same_rows=True),
        lambda: dilated.merge_rows(tensor, lse, rows, tensor, lse, same_rows=True, takes=True),
        lambda: dilated.add_parts(tensor.view(-1), values.view(-1), sums),
        lambda: dilated.add_parts(tensor.view(-1), values.half().view(-1), sums),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert len(stand_in.looked_up) == number, number
        call()
        assert len(stand_in.looked_up) == len(stand_in.started) == number, number


@pytest.mark.parametrize("backward", [False, True])
def test_tables_of_parcels_fit_the_buffer_that_holds_them(stand_in: StandIn, backward: bool) -> None:
    """The same tiles read buffers with and without marks, in which their keys lie at other places."""
    schedule = RingSchedule(DilatedPattern((128, 128), (1, 2)), SequenceLayout(128, 2), 4, 4, False)
    plan = rank_plan(schedule, 0, batch=1, head_dim=16, itemsize=4, backward=backward)
    (tiles,) = [tiles for _, step in plan.steps for tiles in step.tiles if any(tile.parcels for tile in tiles)]
    sent = tuple(dict.fromkeys(parcel for tile in tiles for parcel in tile.parcels))
    device, plain = torch.device("cpu"), RowFormat(1, 16, 16, torch.float32)
    passed_on = WireBuffer(plain, sent, CallMemory(device)) if backward else None
    tables = []
    for marks in (None, torch.bool, torch.int64, None):
        arrived = WireBuffer(replace(plain, marks=marks), sent, CallMemory(device))
        rows = replace(PLAIN, key_marks=None if marks is None else QUERY[..., 0].to(marks))
        table = [x for x in Launch.of_step(tiles, rows, arrived, passed_on) if x.table.is_packed][-1].table
        tables.append(table)
        places = {tuple(columns) for columns in table.keys[:, 7:9].tolist()}
        assert places == {tuple(x // 4 for x in arrived.slice_offsets(sent[-1])[:2])}
    assert tables[0] is tables[3]
    assert len({*map(id, tables)}) == 3


def test_records_are_few(stand_in: StandIn) -> None:
    records: list[Record] = []
    for key in range(3 * MAX_RECORDS):
        launch(records, stand_in, key, (QUERY, None), lambda: Record(stand_in, 1, (), lambda *x: tuple(x[1]), {}))
        assert 1 <= len(records) <= MAX_RECORDS
    assert stand_in.looked_up[0][4] == Source.of(None)


def test_hooks_of_profilers_see_a_launch(stand_in: StandIn) -> None:
    records: list[Record] = []
    knobs = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    with mock.patch.object(launch_records, "runtime", return_value=Runtime(lambda device: 7, knobs)):
        tensor = torch.zeros(2)
        for _ in range(2):
            launch(records, stand_in, 0, (tensor,), lambda: Record(stand_in, 1, (), lambda *x: (tuple(x[1]),), {}))
        assert (len(stand_in.looked_up), len(stand_in.started)) == (1, 1)
        knobs.launch_enter_hook.calls.append(print)
        launch(records, stand_in, 0, (tensor,), lambda: records[0])
    assert (len(stand_in.looked_up), len(stand_in.started)) == (2, 1)  # which calls the hooks


def test_other_releases_of_triton_start_their_kernels_themselves(stand_in: StandIn) -> None:
    records: list[Record] = []
    with mock.patch.object(launch_records, "runtime", return_value=None):
        for _ in range(2):
            launch(records, stand_in, 0, (QUERY,), lambda: Record(stand_in, 1, (), lambda *x: (x[1][0],), {"C": 3}))
    assert stand_in.looked_up[0] == stand_in.looked_up[1] == (1, 1, 1, (QUERY.data_ptr(), QUERY.stride()), 3)
    assert not stand_in.started


def test_on_rocm_triton_starts_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher for GPUs of AMD has not been tried with what a record keeps."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launch_records.runtime.__wrapped__() is None
