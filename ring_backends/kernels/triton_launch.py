"""Launches the Triton kernels: imports them, chooses their block sizes, and lists their arguments.

This module itself does not import Triton.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.launch_records import Record, Source, launch
from ring_backends.kernels.steps import Grads, PackedParcels, StepRows, part_positions
from ring_backends.kernels.tile_table import Offsets, TileGroup, TileTable, parcels, tile_groups, tile_table
from ring_backends.schedule.rank_plan import Parcel, ParcelPart, Tile

NO_MARKS, MASK, DOCUMENTS = range(3)
NO_WORDS, DROPOUT, POSITIONS = range(3)
MIN_CAPABILITY = (8, 0)
ON_ROCM = "RING_BACKENDS_TRITON_ON_ROCM"
"""Name of an environment variable. If it is set to anything but 0, the kernels run on GPUs of AMD."""

MAX_TABLES = 8
"""How many tables are kept for one group of tiles: for other devices, and for other layouts of buffers."""


class Kernels(NamedTuple):
    """The Triton kernels, and whether Triton's interpreter runs them."""

    forward: Any
    grad_query: Any
    grad_key_value: Any
    move_rows: Any
    merge_rows: Any
    add_parts: Any
    is_interpreted: bool


@cache
def kernels() -> Kernels:
    """Import Triton and the kernels."""
    triton = importlib.import_module("triton")
    forward, grad_query, grad_key_value, rows = (
        importlib.import_module(f"ring_backends.kernels.triton.{name}")
        for name in ("forward", "grad_query", "grad_key_value", "rows")
    )
    is_interpreted = not isinstance(forward.forward_kernel, triton.JITFunction)
    return Kernels(
        forward.forward_kernel,
        grad_query.grad_query_kernel,
        grad_key_value.grad_key_value_kernel,
        rows.move_rows_kernel,
        rows.merge_rows_kernel,
        rows.add_parts_kernel,
        is_interpreted,
    )


@cache
def import_failure() -> str | None:
    """The reason why the kernels cannot be imported; None if they can."""
    try:
        kernels()
    except ModuleNotFoundError as error:
        if error.name != "triton":
            return f"Triton cannot be imported: {error}"
        return "Triton is not installed; install the release that this torch names: pip install triton"
    except Exception as error:  # a later release may lack anything that the kernels use
        return f"the installed release of Triton cannot be used: {type(error).__name__}: {error}"
    return None


def device_reasons(device: torch.device) -> list[str]:
    """The reasons why the kernels cannot run on a CUDA device; empty if they can."""
    if torch.version.hip is not None and os.environ.get(ON_ROCM, "0") in ("", "0"):
        return [f"it compiles for AMD's gfx90a and gfx942, but none has run it; set {ON_ROCM}=1 to use it untested"]
    if not torch.cuda.is_available():
        return [f"torch {torch.__version__} sees no CUDA device here"]
    if torch.version.hip is not None:
        return []
    found = capability(device)
    if found < MIN_CAPABILITY:
        return [f"it needs compute capability 8.0, this is {found[0]}.{found[1]}"]
    return []


class QuerySources(NamedTuple):
    """What a launch reads of queries."""

    table: Tensor
    query: Source
    documents: Source
    words: Source


class KeySources(NamedTuple):
    """What a launch reads of keys."""

    table: Tensor
    key: Source
    value: Source
    marks: Source
    words: Source


class OwnerTables(NamedTuple):
    """Which blocks of rows the programs own: :class:`~ring_backends.kernels.tile_table.Owners` for one block size."""

    work: Tensor
    bounds: Tensor
    links: Tensor


class Blocks(NamedTuple):
    """Query rows and keys per block, and Triton's number of warps and of pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


_HOPPER_BLOCKS = {
    "forward": {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3), 256: Blocks(64, 32, 8, 1)},
    "grad_query": {64: Blocks(64, 32, 4, 3), 128: Blocks(64, 32, 4, 3), 256: Blocks(32, 32, 8, 1)},
    "grad_key_value": {64: Blocks(32, 64, 4, 3), 128: Blocks(32, 64, 4, 3), 256: Blocks(32, 32, 8, 1)},
}
"""Blocks in fp16 and bf16 for compute capability 9.x to 11.x, by kernel and largest padded head dim.

Those up to 128 were the fastest of about ten choices each on an H100, or at most 2 % slower.
"""

_AMPERE_BLOCKS = {
    "forward": {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 32, 4, 3), 256: Blocks(64, 32, 8, 1)},
    "grad_query": {64: Blocks(64, 32, 4, 2), 128: Blocks(64, 32, 4, 3), 256: Blocks(32, 32, 8, 1)},
    "grad_key_value": {64: Blocks(16, 64, 4, 3), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 32, 8, 1)},
}
"""The same for the others, whose blocks may have 99 KiB of shared memory, and on GPUs of AMD 64 KiB. They were not
measured.
"""

_PAIRWISE_BLOCKS = {
    "forward": {64: Blocks(64, 32, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 32, 8, 1)},
    "grad_query": {64: Blocks(64, 16, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 32, 8, 1)},
    "grad_key_value": {64: Blocks(32, 32, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 32, 8, 1)},
}
"""The same with documents, dropout or a score_mod, which need more registers for each pair. They were not measured."""

_FP32_BLOCKS = {64: Blocks(32, 32, 8, 1), 128: Blocks(16, 16, 4, 1), 256: Blocks(16, 16, 8, 1)}
_INTERPRETED_BLOCKS = Blocks(16, 8, 4, 1)
"""Blocks of the interpreter. Both sizes differ, so that tests notice if they are mixed up."""


def block_sizes(kernel: str, rows: StepRows, *, is_interpreted: bool) -> Blocks:
    """The blocks of the kernel called ``kernel``.

    The query rows of ``grad_query`` are a multiple of those of ``grad_key_value``, and these divide
    :data:`~ring_backends.kernels.tile_table.NUMBER_ALIGNMENT`: one kernel stores what the other reads in whole blocks.
    """
    if is_interpreted:
        return _INTERPRETED_BLOCKS
    head_dim = max(64, padded_head_dim(max(rows.query.shape[3], rows.value.shape[3])))
    if rows.query.dtype == torch.float32:
        return _FP32_BLOCKS[head_dim]
    if rows.query_documents is not None or has_words(rows):
        return _PAIRWISE_BLOCKS[kernel][head_dim]
    is_nvidia = torch.version.hip is None
    has_large_shared_memory = is_nvidia and (9, 0) <= capability(rows.query.device) < (12, 0)
    of_half = _HOPPER_BLOCKS if has_large_shared_memory else _AMPERE_BLOCKS
    return of_half[kernel][head_dim]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def padded_head_dim(head_dim: int) -> int:
    """The power of two that holds ``head_dim``, at least 16, since Triton multiplies no smaller matrices."""
    return max(16, 1 << (head_dim - 1).bit_length())


class Launch:
    """The tiles of one branch in one step, and what their kernels read.

    Args:
        rows: this rank's rows.
        tile: the first tile.
        inputs: query, documents and words of queries, key, value, marks and words of keys. Words are those that dropout
            hashes, or for a score_mod the global positions.
        passed_on: the buffer for dK and dV of keys that lie in parcels.
    """

    def __init__(
        self,
        rows: StepRows,
        tile: Tile,
        table: TileTable,
        inputs: tuple[Tensor | None, ...],
        passed_on: PackedParcels | None,
    ) -> None:
        self.tile, self.table = tile, table
        self._rows, self._inputs, self._passed_on = rows, inputs, passed_on

    @classmethod
    def of_step(
        cls, tiles: Sequence[Tile], rows: StepRows, arrived: PackedParcels | None, passed_on: PackedParcels | None
    ) -> Iterator[Launch]:
        """The launches of a step, in order."""
        of_queries = rows.query, rows.query_documents, _words(rows, rows.query_words)
        of_keys = rows.key, rows.value, rows.key_marks, _words(rows, rows.key_words)
        for group in tile_groups(tiles):
            inputs, table = of_keys, _table(group, tiles, rows, arrived, passed_on)
            if group.is_packed:
                assert arrived is not None
                keys = arrived.buffer.view(rows.key.dtype)
                marks = None if rows.key_marks is None else arrived.buffer.view(rows.key_marks.dtype)
                words = None
                if has_words(rows):
                    sent = parcels(tiles[group.tiles])
                    words = torch.cat([_words_of_parcel(rows, parcel).flatten() for parcel in sent])
                inputs = keys, keys, marks, words
            yield cls(rows, tiles[group.tiles.start], table, (*of_queries, *inputs), passed_on)

    def run(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Run the kernel called ``name``, a field of :class:`Kernels`.

        Args:
            tensors: those that other kernels do not have, in the order of the kernel's arguments.
        """
        rows, mod, dropout = self._rows, self._rows.translation, self._rows.dropout
        key: tuple[object, ...] = name, rows.query.shape, rows.value.shape[3], rows.first_head
        numbers: tuple[Any, ...] = rows.scale, 1.0, None
        all_tensors = *self._inputs, *tensors, *(() if mod is None else mod.tensors)
        if dropout is not None:
            key = *key, dropout.threshold
            numbers = rows.scale, dropout.weight, None
        elif mod is not None:
            key = *key, mod.source, *(x if isinstance(x, int) else float for x in mod.numbers)
            numbers = rows.scale, 1.0, mod.numbers or None
        work_out = partial(self._record, name, len(tensors))
        launch(self.table.records, getattr(kernels(), name), key, all_tensors, work_out, numbers)

    def _record(self, name: str, num_tensors: int) -> Record:
        rows, mod, dropout = self._rows, self._rows.translation, self._rows.dropout
        head_dim, value_dim = rows.query.shape[3], rows.value.shape[3]
        blocks = block_sizes(name, rows, is_interpreted=kernels().is_interpreted)
        owns_keys = name == "grad_key_value"
        owners = self.table.by_key if owns_keys else self.table.by_query
        work = owners.work(blocks.keys if owns_keys else blocks.queries)
        constants = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded_head_dim(head_dim),
            "VALUE_DIM": value_dim,
            "BLOCK_V": padded_head_dim(value_dim),
            "BLOCK_Q": blocks.queries,
            "BLOCK_K": blocks.keys,
            "MARKS": NO_MARKS if rows.key_marks is None else MASK if rows.query_documents is None else DOCUMENTS,
            "WORDS": POSITIONS if mod is not None else NO_WORDS if dropout is None else DROPOUT,
            "SCORE_MOD": None if mod is None else mod.function,
            "PACKED": self.table.is_packed,
            "BANDED": self.table.is_banded,
        }
        return Record(
            getattr(kernels(), name),
            work.shape[0] * rows.query.shape[0],
            (self.table.queries, self.table.keys, work, owners.bounds, owners.links),
            _Arrangement(
                num_tensors=num_tensors,
                num_programs=work.shape[0],
                threshold=0 if dropout is None else dropout.threshold,
                first_head=rows.first_head,
                has_score_mod=mod is not None,
            ),
            constants,
            {"num_warps": blocks.warps, "num_stages": blocks.stages},
        )

    def key_grads(self, sums: Grads) -> tuple[Tensor, Tensor]:
        """The tensors that take dK and dV."""
        if not self.table.is_packed:
            return sums.key, sums.value
        assert self._passed_on is not None
        grads = self._passed_on.buffer.view(torch.float32)
        return grads, grads


@dataclass(frozen=True)
class _Arrangement:
    """Arranges the arguments of the kernels of a step: the inputs, ``num_tensors`` others, and those of a score_mod."""

    num_tensors: int
    num_programs: int
    threshold: int
    first_head: int
    has_score_mod: bool

    def __call__(self, tables: Sequence[Any], sources: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        (queries, keys, *of_owners), (scale, weight, captured_numbers) = tables, numbers
        end, captured = 7 + self.num_tensors, None
        if self.has_score_mod:
            captured = tuple([pointer for pointer, _ in sources[end:]]) or None, captured_numbers
        return (
            QuerySources(queries, *sources[:3]),
            KeySources(keys, *sources[3:7]),
            *sources[7:end],
            OwnerTables(*of_owners),
            self.num_programs,
            scale,
            self.threshold,
            weight,
            self.first_head,
            captured,
        )


def has_words(rows: StepRows) -> bool:
    """Whether queries and keys have words: those that dropout hashes, or their positions for a score_mod."""
    return rows.dropout is not None or rows.score_mod is not None


def _words(rows: StepRows, of_dropout: Tensor | None) -> Tensor | None:
    """The words of this rank's queries or keys, [batch, local seq, heads, ...]; None without."""
    if rows.score_mod is None or rows.positions is None:
        return of_dropout
    return rows.positions[None, :, None].expand(*rows.query.shape[:3])


def _words_of_parcel(rows: StepRows, parcel: Parcel) -> Tensor:
    """The words of a parcel's keys: [streams, rows]."""
    everything = ParcelPart(parcel, tuple(range(parcel.num_streams)), range(parcel.rows))
    positions = part_positions(everything, rows.key)
    return rows.key_words_at(positions) if rows.score_mod is None else positions


def _table(
    group: TileGroup,
    tiles: Sequence[Tile],
    rows: StepRows,
    arrived: PackedParcels | None,
    passed_on: PackedParcels | None,
) -> TileTable:
    """The tables of a group of the tiles. They depend on where the parcels lie in their buffers."""
    device, sources = rows.query.device, (arrived, passed_on) if group.is_packed else ()
    made_for = device, *(None if buffer is None else buffer.layout for buffer in sources)
    for known, table in group.tables:
        if known == made_for:
            return table
    offsets: tuple[Offsets, ...] = ()
    its_tiles = tuple(tiles[group.tiles])
    if group.is_packed:
        assert arrived is not None
        offsets = tuple(_offsets(parcels(its_tiles), rows, arrived, passed_on))
    if len(group.tables) >= MAX_TABLES:
        group.tables.clear()
    table = tile_table(its_tiles, offsets, device)
    group.tables.append((made_for, table))
    return table


def _offsets(
    sent: Sequence[Parcel], rows: StepRows, arrived: PackedParcels, passed_on: PackedParcels | None
) -> Iterator[Offsets]:
    """The offsets of the slices of each parcel, in elements: of K, V, the marks, the dropout words, dK and dV."""
    size = rows.key.dtype.itemsize
    first_word = 0
    for parcel in sent:
        key, value, *marks = arrived.slice_offsets(parcel)
        mark = marks[0] // rows.key_marks.dtype.itemsize if marks and rows.key_marks is not None else 0
        grads = (0, 0) if passed_on is None else passed_on.slice_offsets(parcel)
        yield key // size, value // size, mark, first_word, grads[0] // 4, grads[1] // 4
        first_word += parcel.num_streams * parcel.rows
