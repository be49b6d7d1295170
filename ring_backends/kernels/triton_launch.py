"""Launches the Triton kernels: imports them, chooses their block sizes, and lists their arguments.

This module itself does not import Triton.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.constants import keep_if_captured
from ring_backends.kernels.steps import Grads, PackedParcels, StepRows, part_positions
from ring_backends.kernels.tile_table import Offsets, TileTable, launches, parcels, tile_table
from ring_backends.schedule.rank_plan import Parcel, ParcelPart, Tile

NO_MARKS, MASK, DOCUMENTS = range(3)
NO_WORDS, DROPOUT, POSITIONS = range(3)
MIN_CAPABILITY = (8, 0)
LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Triton's options for every launch. Triton 3.9 announces that later releases round between a multiplication and an
addition unless a launch says otherwise. That takes more instructions."""


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
    if torch.version.hip is not None:
        return ["its block sizes are those of NVIDIA's GPUs, and this torch was built for ROCm"]
    if not torch.cuda.is_available():
        return [f"torch {torch.__version__} sees no CUDA device here"]
    found = capability(device)
    if found < MIN_CAPABILITY:
        return [f"it needs compute capability 8.0, this is {found[0]}.{found[1]}"]
    return []


class Source(NamedTuple):
    """A tensor as an argument of a kernel, with four strides, so that all tensors of a dtype have the same type."""

    pointer: Tensor | None
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | None) -> Source:
        """Strides are 0 for dims that the tensor lacks, and without a tensor."""
        if tensor is None:
            return cls(None, (0,) * 4)
        strides = (*tensor.stride(), *(0,) * (4 - tensor.dim()))
        return cls(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, strides)


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
"""The same for the others, whose blocks may have 99 KiB of shared memory. They were not measured."""

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
    has_large_shared_memory = (9, 0) <= capability(rows.query.device) < (12, 0)
    of_half = _HOPPER_BLOCKS if has_large_shared_memory else _AMPERE_BLOCKS
    return of_half[kernel][head_dim]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def padded_head_dim(head_dim: int) -> int:
    """The power of two that holds ``head_dim``, at least 16, since Triton multiplies no smaller matrices."""
    return max(16, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True)
class Launch:
    """The tiles of one branch in one step, and what their kernels read.

    Attributes:
        rows: this rank's rows.
        tile: the first tile.
        queries, keys: words are those that dropout hashes, or for a score_mod the global positions.
    """

    rows: StepRows
    tile: Tile
    table: TileTable
    queries: QuerySources
    keys: KeySources

    @classmethod
    def of_step(
        cls, tiles: Sequence[Tile], rows: StepRows, arrived: PackedParcels | None, passed_on: PackedParcels | None
    ) -> Iterator[Launch]:
        """The launches of a step, in order."""
        of_queries = [Source.of(x) for x in (rows.query, rows.query_documents, _words(rows, rows.query_words))]
        for group in launches(tiles):
            offsets: tuple[Offsets, ...] = ()
            key, value, marks, words = rows.key, rows.value, rows.key_marks, _words(rows, rows.key_words)
            if group[0].parcels:
                assert arrived is not None
                sent = parcels(group)
                offsets = tuple(_offsets(sent, rows, arrived, passed_on))
                key = value = arrived.buffer.view(rows.key.dtype)
                marks = None if marks is None else arrived.buffer.view(marks.dtype)
                words = None
                if has_words(rows):
                    words = torch.cat([_words_of_parcel(rows, parcel).flatten() for parcel in sent])
            table = keep_if_captured(tile_table(group, offsets, key.device), key.device)
            of_keys = [Source.of(x) for x in (key, value, marks, words)]
            yield cls(rows, group[0], table, QuerySources(table.queries, *of_queries), KeySources(table.keys, *of_keys))

    def run(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Run the kernel called ``name``, a field of :class:`Kernels`.

        Args:
            tensors: those that other kernels do not have, in the order of the kernel's arguments.
        """
        rows, mod, dropout = self.rows, self.rows.translation, self.rows.dropout
        head_dim, value_dim = rows.query.shape[3], rows.value.shape[3]
        blocks = block_sizes(name, rows, is_interpreted=kernels().is_interpreted)
        owns_keys = name == "grad_key_value"
        owners = self.table.by_key if owns_keys else self.table.by_query
        work = owners.work(blocks.keys if owns_keys else blocks.queries)
        num_programs = work.shape[0]
        arguments = (
            self.queries,
            self.keys,
            *map(Source.of, tensors),
            OwnerTables(work, owners.bounds, owners.links),
            num_programs,
            rows.scale,
            0 if dropout is None else dropout.threshold,
            1.0 if dropout is None else dropout.weight,
            rows.first_head,
            None if mod is None else mod.captured,
        )
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
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        in_all = num_programs * rows.query.shape[0]
        launch(getattr(kernels(), name), in_all, rows.query.device, arguments, constants, options)

    def key_grads(self, sums: Grads, passed_on: PackedParcels | None) -> tuple[Tensor, Tensor]:
        """The tensors that take dK and dV."""
        if not self.table.is_packed:
            return sums.key, sums.value
        assert passed_on is not None
        grads = passed_on.buffer.view(torch.float32)
        return grads, grads


MAX_COMPILED = 8192
_compiled: dict[Hashable, Any] = {}
"""What Triton compiled, by what it compiled it for: at most :data:`MAX_COMPILED` entries."""


def launch(
    kernel: Any,
    num_programs: int,
    device: torch.device,
    arguments: Sequence[Any],
    constants: Mapping[str, Hashable],
    options: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Launch a Triton kernel on ``device``.

    Triton compiles a kernel for the constants and options, and for the dtypes, the alignment and some values of the
    other arguments. It takes longer to look them up than to launch, so the compiled kernel is kept for arguments that
    are alike.

    Args:
        arguments, constants: all arguments of the kernel, in its order. Its last ones are its constants.
        options: Triton's options for this launch, besides :data:`LAUNCH_OPTIONS`.
    """
    with torch.cuda.device(device.index) if device.type == "cuda" else contextlib.nullcontext():
        key = (kernel, device, *constants.values(), *options.values(), *map(_what_is_compiled, arguments))
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[num_programs, 1, 1](*arguments, *constants.values())
            return
        compiled = kernel[(num_programs,)](*arguments, **constants, **options, **LAUNCH_OPTIONS)
        if compiled is not None:  # the interpreter compiles nothing
            if len(_compiled) >= MAX_COMPILED:
                _compiled.clear()
            _compiled[key] = compiled


def _what_is_compiled(value: Any) -> Hashable:
    """What Triton may compile into a kernel of the value of an argument. Numbers may be compiled by their value."""
    kind = type(value)
    if kind is Source:
        pointer, strides = value
        return None if pointer is None else (pointer.dtype, pointer.data_ptr() % 16 == 0, strides)
    if isinstance(value, tuple):
        return tuple(map(_what_is_compiled, value))
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return float if kind is float else value


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
