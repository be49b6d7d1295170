"""Gathers dilated rows from tensors of any memory layout, scatters them back, adds and merges them.

The rows of all heads of one lattice (:class:`~ring_backends.schedule.rows.HeadRun`) are one strided view. So a gather
makes one copy or none. A scatter writes through the same view. Tensors need not be contiguous. On CUDA devices,
Triton's kernels (``triton/rows.py``) take the place of the views, if they can be used: one launch moves the rows of
several tensors. This module itself does not import Triton.

Tensors are [batch, seq, heads, …]; gathered rows are [batch * segments, heads, rows, …].
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels import triton_launch
from ring_backends.kernels.constants import scalar
from ring_backends.kernels.launch_records import Record, launch
from ring_backends.kernels.merge import merge_
from ring_backends.kernels.tile_table import row_entries
from ring_backends.schedule.rows import DilatedRows, HeadRun
from ring_backends.torch_internals import has_values, untraced

GATHER, STORE, ADD, TAKE = range(4)
"""How rows move. ``TAKE`` adds values like ``ADD``, and then sets them to 0."""

MAX_LAYOUTS = 64
"""How many shapes and strides of tensors are kept for the same rows."""

ROWS_AT_ONCE = 512
"""How many dilated rows of a head are copied on the CPU before the next head. Their pages fit into the TLB."""


class Rows(NamedTuple):
    """Dilated rows of a tensor [batch, seq, heads, …], and as gathered ``values`` [batch * segments, heads, rows, …].

    ``…`` is the head dim or nothing. Strides are free.
    """

    tensor: Tensor
    rows: DilatedRows
    values: Tensor


class _View(NamedTuple):
    """Size and strides of a view, and its storage offset relative to the tensor's own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _RowViews(NamedTuple):
    """The views of rows of tensors with one shape and strides.

    Attributes:
        runs: for each run its heads, and a view [batch, segments, outer, inner, rows, …].
        whole: a view of all heads, [batch * segments, heads, rows, …]; None if the strides do not allow one.
        numel: number of elements of the rows.
        has_gaps: whether the rows of a head do not lie one after another in ``whole``.
    """

    runs: tuple[tuple[slice, _View], ...]
    whole: _View | None
    numel: int
    has_gaps: bool


def _work_out(tensor: Tensor, rows: DilatedRows) -> _RowViews:
    """Work out the views of a tensor's rows, and keep them with the rows."""
    shape, strides = tensor.shape, tensor.stride()
    batch, _, _, *rest = shape
    batch_stride, seq_stride, head_stride, *rest_strides = strides
    segment_stride, runs, first_head = rows.segment_stride * seq_stride, [], 0
    for run in rows.runs:
        outer_stride, inner_stride = (
            heads * head_stride + phases * seq_stride
            for heads, phases in ((run.outer_head, run.outer_phase), (run.inner_head, run.inner_phase))
        )
        size = batch, rows.segments, run.outer, run.inner, rows.rows, *rest
        stride = batch_stride, segment_stride, outer_stride, inner_stride, rows.rate * seq_stride, *rest_strides
        offset = (rows.start + run.phase) * seq_stride + run.head * head_stride
        runs.append((slice(first_head, first_head + run.num_heads), _View(size, stride, offset)))
        first_head += run.num_heads
    whole = None
    if len(runs) == 1:
        (_, (size, stride, offset)), *_ = runs
        groups, heads = (_merged(size[dim : dim + 2], stride[dim : dim + 2]) for dim in (0, 2))
        if groups is not None and heads is not None:
            whole = _View((groups[0], heads[0], *size[4:]), (groups[1], heads[1], *stride[4:]), offset)
    step, has_gaps = 1, False
    for num, distance in zip((rows.rows, *rest)[::-1], (rows.rate * seq_stride, *rest_strides)[::-1], strict=True):
        has_gaps |= num != 1 and distance != step
        step *= num
    if len(rows.views) >= MAX_LAYOUTS:
        rows.views.clear()
    found = rows.views[shape, strides] = _RowViews(tuple(runs), whole, batch * rows.size * math.prod(rest), has_gaps)
    return found


def _merged(size: Sequence[int], stride: Sequence[int]) -> tuple[int, int] | None:
    """Size and stride of two dims as one; None if the strides do not allow it."""
    if size[0] == 1 or size[1] == 1:
        return size[0] * size[1], stride[1] if size[0] == 1 else stride[0]
    return (size[0] * size[1], stride[1]) if stride[0] == size[1] * stride[1] else None


def views(tensor: Tensor, rows: DilatedRows) -> list[tuple[slice, Tensor]]:
    """(heads, view) of each run. The view of ``tensor`` is [batch, segments, outer, inner, rows, …]."""
    found, first = rows.views.get((tensor.shape, tensor.stride())) or _work_out(tensor, rows), tensor.storage_offset()
    return [(heads, tensor.as_strided(size, stride, first + offset)) for heads, (size, stride, offset) in found.runs]


def gathered_shape(tensor: Tensor, rows: DilatedRows) -> tuple[int, ...]:
    """The shape of the gathered rows: [batch * segments, heads, rows, …]."""
    return (tensor.shape[0] * rows.segments, rows.num_heads, rows.rows, *tensor.shape[3:])


def gather(tensor: Tensor, rows: DilatedRows) -> Tensor:
    """The rows, as [batch * segments, heads, rows, …]: a view where the tensor's strides allow one, else a copy."""
    return gather_all([(tensor, rows)])[0]


def gather_all(
    parts: Sequence[tuple[Tensor, DilatedRows]], *, rows_outermost: bool = False, dense: Sequence[bool] = ()
) -> list[Tensor]:
    """Gather rows of several tensors, as :func:`gather` does. All copies are made together.

    Args:
        rows_outermost: whether copies have the memory layout [batch * segments, rows, heads, …].
        dense: for each part whether it must have this layout in memory without gaps; empty for no part.
    """
    copies, gathered = [], []
    for (tensor, rows), is_dense in zip(parts, dense or [False] * len(parts), strict=True):
        found = row_view(tensor, rows)
        if found is None or (is_dense and not found.transpose(1, 2).is_contiguous()):
            groups, heads, num_rows, *rest = shape = gathered_shape(tensor, rows)
            found = (
                tensor.new_empty(groups, num_rows, heads, *rest).transpose(1, 2)
                if rows_outermost
                else tensor.new_empty(shape)
            )
            copies.append(Rows(tensor, rows, found))
        gathered.append(found)
    gather_many(copies)
    return gathered


def row_view(tensor: Tensor, rows: DilatedRows, max_bytes: int | None = None) -> Tensor | None:
    """The rows as a view [batch * segments, heads, rows, …].

    Returns None if the tensor's strides do not allow one, or if the rows have more than ``max_bytes`` bytes and those
    of a head do not lie one after another.
    """
    _, whole, numel, has_gaps = rows.views.get((tensor.shape, tensor.stride())) or _work_out(tensor, rows)
    if whole is None or (max_bytes is not None and has_gaps and numel * tensor.itemsize > max_bytes):
        return None
    return tensor.as_strided(whole.size, whole.stride, tensor.storage_offset() + whole.offset)


def gather_many(parts: Sequence[Rows]) -> None:
    """Copy the rows of several tensors into their ``values``: on CUDA devices in one launch, if Triton is installed."""
    _move(gathered=parts)


class RowMemory:
    """Memory for copies of rows, which all tiles of one forward or backward use one after the other."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._copies: dict[str, Rows] = {}

    def copy(self, name: str, tensor: Tensor, rows: DilatedRows) -> Tensor:
        """A contiguous copy of the rows. It is valid until the next one of that name."""
        last = self._copies.pop(name, None)
        if last is not None and last.tensor is tensor and last.rows == rows:
            self._copies[name] = last
            return last.values
        del last  # frees the memory if it is too small
        shape = gathered_shape(tensor, rows)
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory.pop(name, None)
            self._memory[name] = tensor.new_empty(size)
        copied = self._copies[name] = Rows(tensor, rows, self._memory[name][:size].view(shape))
        gather_many([copied])
        return copied.values


def scatter(tensor: Tensor, rows: DilatedRows, values: Tensor) -> None:
    """Copy ``values``, [batch * segments, heads, rows, …], into the rows of ``tensor``."""
    _move(stored=[Rows(tensor, rows, values)])


def scatter_many(stored: Sequence[Rows] = (), added: Sequence[Rows] = ()) -> None:
    """Copy the ``values`` of ``stored`` into their rows, and add those of ``added``, as :func:`gather_many` does.

    No two of them may write the same row of a tensor.
    """
    _move(stored=stored, added=added)


def merge_rows(
    out: Tensor,
    lse: Tensor,
    rows: DilatedRows,
    other_out: Tensor,
    other_lse: Tensor,
    *,
    same_rows: bool = False,
    takes: bool = False,
) -> None:
    """Merge another result into the rows of ``out``, and of ``lse`` [batch, seq, heads], in place.

    Args:
        other_out, other_lse: gathered rows, or with ``same_rows`` tensors that hold the same rows where they are.
        takes: whether ``other_lse`` is set to −inf in these rows, so that they are not merged again.
    """
    if can_launch(out, lse, other_out, other_lse):
        _launch_merge(out, lse, rows, other_out, other_lse, same_rows, takes)
        return
    pairs = zip(_paired(out, rows, other_out, same_rows), _paired(lse, rows, other_lse, same_rows), strict=True)
    for (out_view, other), (lse_view, other_lse_view) in pairs:
        merge_(out_view, lse_view, other, other_lse_view)
        if takes:
            other_lse_view.fill_(-math.inf)


def add_rows(parts: Sequence[Rows], *, takes: bool = False) -> None:
    """Add the rows of each part's ``values`` to the same rows of its tensor, and with ``takes`` set them to 0.

    No two parts may hold the same row of a tensor. Unlike elsewhere, ``values`` are not gathered. They are in the same
    places of a tensor [batch, seq, heads, …].
    """
    _move(added=parts, same_rows=True, takes=takes)


class SumPart(NamedTuple):
    """Elements that are added to others: their place and number, and where each of the summands begins."""

    start: int
    length: int
    sources: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sums:
    """What :func:`add_parts` adds, and its launches."""

    parts: tuple[SumPart, ...]
    records: list[Record] = field(default_factory=list)


def add_parts(into: Tensor, summands: Tensor, sums: Sums) -> None:
    """Add elements of one flat tensor to those of another: on CUDA devices in one launch, if Triton is installed."""
    if can_launch(into, summands):
        kernel = triton_launch.kernels().add_parts
        launch(sums.records, kernel, None, (into, summands), lambda: _add_record(kernel, sums.parts, into.device))
        return
    for turn in range(max(len(part.sources) for part in sums.parts)):
        pairs = [
            (into[part.start : part.start + part.length], summands[source : source + part.length])
            for part in sums.parts
            for source in part.sources[turn : turn + 1]
        ]
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def _add_record(kernel: Any, parts: Sequence[SumPart], device: torch.device) -> Record:
    tables = _sum_tables(parts, device)

    def arrange(tables: Sequence[Any], sources: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        return (*[pointer for pointer, _ in sources], *tables)

    return Record(kernel, len(tables[2]), tables, arrange, {"BLOCK": BLOCK_ELEMENTS})


@untraced
def _sum_tables(parts: Sequence[SumPart], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The parts [parts, 4], with the first of their summands and the number of these; the summands; and the part and
    block of each program."""
    counts = [len(part.sources) for part in parts]
    firsts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    table = [[part.start, part.length, first, count] for part, first, count in zip(parts, firsts, counts, strict=True)]
    blocks = torch.tensor([-(-part.length // BLOCK_ELEMENTS) for part in parts], device="cpu")
    owner = torch.arange(len(parts), device="cpu").repeat_interleave(blocks)
    block = torch.arange(len(owner), device="cpu") - (blocks.cumsum(0) - blocks)[owner]
    tables = (
        torch.tensor(table, dtype=torch.int64, device="cpu"),
        torch.tensor([source for part in parts for source in part.sources], dtype=torch.int64, device="cpu"),
        torch.stack([owner, block], 1).to(torch.int32),
    )
    first, second, third = (x.to(device) for x in tables)
    return first, second, third


def fill_rows(parts: Sequence[tuple[Tensor, DilatedRows]], value: float) -> None:
    """Set all elements of the rows of each tensor to ``value``."""
    if parts and all(can_launch(tensor) for tensor, _ in parts):
        values = scalar(value, parts[0][0].dtype, parts[0][0].device)
        filled = [Rows(x, rows, values.expand(gathered_shape(x, rows))) for x, rows in parts]
        _launch_moves([(part, STORE) for part in filled])
        return
    for tensor, rows in parts:
        for _, view in views(tensor, rows):
            view.fill_(value)


def whole(values: Tensor, rows: DilatedRows, shape: Sequence[int]) -> Tensor | None:
    """The values of gathered rows as a contiguous [batch, seq, heads, …]: a view, or None if that needs a copy.

    Args:
        rows: the rows that ``values``, [batch * segments, heads, rows, …], were computed for.
        shape: the shape of the whole tensor.
    """
    is_whole = rows.views.get(shape)
    if is_whole is None:
        _, seq, heads, *_ = shape
        runs_over_heads = rows.runs == (HeadRun(0, 0, inner=heads, inner_head=1 if heads > 1 else 0),)
        all_rows = rows.rate == 1 and rows.start == 0 and rows.segments * rows.rows == seq
        is_whole = runs_over_heads and all_rows and rows.segment_stride in (0, rows.rows)
        rows.views[shape] = is_whole
    if not is_whole:
        return None
    rows_outermost = values.transpose(1, 2)
    return rows_outermost.view(shape) if rows_outermost.is_contiguous() else None


def _move(
    gathered: Sequence[Rows] = (),
    stored: Sequence[Rows] = (),
    added: Sequence[Rows] = (),
    *,
    same_rows: bool = False,
    takes: bool = False,
) -> None:
    """Gather, store or add rows.

    Args:
        same_rows: whether values are in the same rows of another tensor, and not gathered.
        takes: whether the values that are added are then set to 0.
    """
    parts = [*gathered, *stored, *added]
    if not parts:
        return
    tensors, _, of_rows = zip(*parts, strict=True)
    if can_launch(*tensors, *of_rows):
        moves = [GATHER] * len(gathered) + [STORE] * len(stored) + [TAKE if takes else ADD] * len(added)
        _launch_moves([*zip(parts, moves, strict=True)], same_rows=same_rows)
        return
    for part in gathered:
        for view, values in _paired(*part, same_rows):
            values.copy_(view)
    for part in stored:
        for view, values in _paired(*part, same_rows):
            view.copy_(values)
    for part in added:
        for view, values in _paired(*part, same_rows):
            view.add_(values)
            if takes:
                values.zero_()


def _paired(tensor: Tensor, rows: DilatedRows, values: Tensor, same_rows: bool) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a view of the tensor's rows, and a view of the same rows of ``values``, of the same shape.

    On the CPU, many dilated rows are split, so that the same rows of all heads are copied before further rows. These
    rows lie on the same pages of memory.
    """
    if same_rows:
        both = zip(views(tensor, rows), views(values, rows), strict=True)
        return [(view, other) for (_, view), (_, other) in both]
    is_split = rows.rate > 1 and rows.rows > ROWS_AT_ONCE and tensor.device.type == "cpu"
    whole = None if is_split else row_view(tensor, rows)
    if whole is not None:
        return [(whole, values)]
    values = values.unflatten(0, (values.shape[0] // rows.segments, rows.segments))
    at_once = ROWS_AT_ONCE if is_split else rows.rows
    pairs: list[tuple[Tensor, Tensor]] = []
    for heads, view in views(tensor, rows):
        part = values[:, :, heads].unflatten(2, view.shape[2:4])
        pairs += zip(view.split(at_once, 4), part.split(at_once, 4), strict=True)
    return pairs


# --- in Triton --------------------------------------------------------------------------------------------------------

BLOCK_ELEMENTS = 4096
MAX_TENSORS = 8
"""Tensors per launch. Triton compiles the kernel for each number of tensors."""


def can_launch(*tensors: Tensor) -> bool:
    """Whether the kernels serve these tensors: on a CUDA device that Triton supports, with values, not in fp64."""
    return _is_supported(tensors[0].device) and all(
        x.is_cuda and x.dtype not in _UNSUPPORTED and has_values(x) for x in tensors
    )


_UNSUPPORTED = {torch.float64, torch.complex64, torch.complex128}


@cache
def _is_supported(device: torch.device) -> bool:
    return device.type == "cuda" and not triton_launch.device_reasons(device) and triton_launch.import_failure() is None


def _launch_moves(moves: Sequence[tuple[Rows, int]], *, same_rows: bool = False) -> None:
    """Move rows in Triton, those of up to :data:`MAX_TENSORS` tensors per launch."""
    moves = [move for move in moves if move[0].values.numel()]
    kernel = triton_launch.kernels().move_rows
    for start in range(0, len(moves), MAX_TENSORS):
        some = moves[start : start + MAX_TENSORS]
        tensors, all_rows, values = zip(*[part for part, _ in some], strict=True)
        kinds = [move for _, move in some]
        shapes = [x.shape for x in tensors]
        # The rows of the first part hold the record.
        key = same_rows, *kinds, *shapes, *all_rows[1:]
        work_out = partial(_move_record, kernel, all_rows, shapes, kinds, same_rows, tensors[0].device)
        launch(all_rows[0].launches, kernel, key, (*tensors, *values), work_out)


def _move_record(
    kernel: Any,
    all_rows: Sequence[DilatedRows],
    shapes: Sequence[torch.Size],
    moves: Sequence[int],
    same_rows: bool,
    device: torch.device,
) -> Record:
    blocks = [(*_block(shape), move) for shape, move in zip(shapes, moves, strict=True)]
    num_programs = tuple(
        _num_programs(shape, rows, block) for shape, rows, (*_, block, _) in zip(shapes, all_rows, blocks, strict=True)
    )
    count = len(blocks)

    def arrange(tables: Sequence[Any], sources: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(sources[:count]), tuple(sources[count:]), tuple(tables), num_programs

    tables = [rows_table(rows, device) for rows in all_rows]
    constants: dict[str, Hashable] = {"BLOCKS": tuple(blocks), "SAME_ROWS": same_rows}
    return Record(kernel, sum(num_programs), tables, arrange, constants)


def _launch_merge(
    out: Tensor, lse: Tensor, rows: DilatedRows, other_out: Tensor, other_lse: Tensor, same_rows: bool, takes: bool
) -> None:
    """Merge rows in Triton. LSEs are in fp32."""
    if not other_lse.numel():
        return
    kernel, shape, device = triton_launch.kernels().merge_rows, out.shape, out.device
    work_out = partial(_merge_record, kernel, rows, shape, same_rows, takes, device)
    launch(rows.launches, kernel, (same_rows, takes, shape), (out, lse, other_out, other_lse), work_out)


def _merge_record(
    kernel: Any, rows: DilatedRows, shape: torch.Size, same_rows: bool, takes: bool, device: torch.device
) -> Record:
    head_dim, padded, block = _block(shape)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded,
        "BLOCK_ROWS": block,
        "SAME_ROWS": same_rows,
        "TAKES": takes,
    }

    def arrange(tables: Sequence[Any], sources: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        return (*sources, *tables)

    return Record(kernel, _num_programs(shape, rows, block), [rows_table(rows, device)], arrange, constants)


@lru_cache(maxsize=4096)
@untraced
def rows_table(rows: DilatedRows, device: torch.device) -> Tensor:
    """The rows as int64 numbers: how many heads, then the entry of each head. Nobody may change the tensor."""
    numbers = [rows.num_heads, *chain.from_iterable(row_entries(rows))]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


def _block(shape: torch.Size) -> tuple[int, int, int]:
    """The head dim, or 1 without one; the power of two that holds it; and the rows per program."""
    head_dim = shape[3] if len(shape) > 3 else 1
    padded = 1 << (head_dim - 1).bit_length()
    return head_dim, padded, max(1, min(1024, BLOCK_ELEMENTS // padded))


def _num_programs(shape: torch.Size, rows: DilatedRows, block: int) -> int:
    return shape[0] * rows.segments * rows.num_heads * -(-rows.rows // block)
