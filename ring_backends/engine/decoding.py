"""One step of decoding: a few new tokens against a cache that is distributed over the ring.

Every rank has the same new tokens. It attends from them to its own rows of the cache, and the ranks exchange and merge
the results. A rank also computes a part of the attention among the new tokens. No keys and values are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.engine.cache import ENDLESS, KeyValueCache
from ring_backends.engine.call import autocast
from ring_backends.engine.validation import check_sinks, check_tensors
from ring_backends.errors import RingMismatchError
from ring_backends.kernels import Kernel, KernelInputs, PairRule, TileInputs, select_kernel
from ring_backends.kernels.constants import constant
from ring_backends.kernels.merge import merge_, statistics_dtype
from ring_backends.kernels.per_tile import forward_tile
from ring_backends.kernels.score_mod import PairScores, ScoreMod, captured_values, check_score_mod, identity
from ring_backends.kernels.steps import split_scale
from ring_backends.ring.calls import Configuration
from ring_backends.schedule.bands import CAUSAL, Band, Blocks, Part, as_slice, cut_band
from ring_backends.schedule.pattern import DilatedPattern

MAX_EXCHANGED_BYTES = 32 * 2**20
"""The most memory for results of all ranks at a time. The results of longer steps are exchanged in parts."""

_TOLERANCE = 0.05
"""By how much the keys of equal tokens may differ between ranks, relative to their norm: more than rounding."""


@dataclass(frozen=True)
class Group:
    """The heads of one branch with the same offset, and the new tokens that they cover in one segment.

    Attributes:
        branch: index of the branch.
        heads: the heads.
        begin: the first position of the segment that they cover and that a new token sees.
        rows: the new tokens, counted from the first one.
        band: by how many covered rows a query and a key may be apart; None if no window limits it.
    """

    branch: int
    heads: range
    begin: int
    rows: range
    band: int | None


class _Queries(NamedTuple):
    """The new tokens of a group: views of query, and of the out and LSE so far, [batch, heads, rows, …]."""

    query: Tensor
    out: Tensor
    lse: Tensor


class _Keys(NamedTuple):
    """Keys and values of a group, [batch, key/value heads, rows, …], and bool, True for a key to ignore."""

    key: Tensor
    value: Tensor
    ignored: Tensor | None

    @classmethod
    def of(
        cls,
        key: Tensor | None,
        value: Tensor | None,
        ignored: Tensor | None,
        rows: slice,
        heads: slice | tuple[int, ...],
    ) -> _Keys:
        """The rows of some heads. ``ignored`` is [batch, 1, rows]."""
        assert key is not None
        assert value is not None
        key, value = (_heads_of(x[:, :, rows], heads) for x in (key, value))
        mask = None if ignored is None else ignored[:, :, rows].expand(-1, key.shape[1], -1)
        return cls(key, value, mask)


@dataclass(frozen=True)
class Step:
    """One checked step.

    Attributes:
        query: [batch, heads, new tokens, head_dim].
        key: [batch, key/value heads, new tokens, head_dim].
        value: [batch, key/value heads, new tokens, value_dim].
        ignored: bool [batch, new tokens], True for a key to ignore; None for none.
        has_sinks: whether the call has sinks. They are merged after the exchange.
        score_mod: changes the score of each pair; None for no change.
    """

    pattern: DilatedPattern
    cache: KeyValueCache
    kernel: Kernel
    scale: float
    query: Tensor
    key: Tensor
    value: Tensor
    ignored: Tensor | None
    has_sinks: bool
    score_mod: ScoreMod | None = None

    def local_result(self) -> tuple[Tensor, Tensor]:
        """out and LSE of the new tokens over this rank's keys, in the statistics dtype."""
        query, cache = self.query, self.cache
        sign, scale = split_scale(self.scale)
        signed = query if sign == 1 else query * sign
        ignored = None if self.ignored is None else self.ignored.unsqueeze(1)
        batch, num_heads, tokens, _ = query.shape
        shape = batch, tokens, num_heads, self.value.shape[3]
        out = query.new_zeros(shape, dtype=statistics_dtype(query.dtype)).transpose(1, 2)
        lse = torch.full_like(out[..., 0], -math.inf)
        ring = cache.ring
        for number, group in enumerate(groups(self.pattern, query.shape[1], cache.seq_len, query.shape[2])):
            heads = as_slice(group.heads)
            place = slice(None), heads, as_slice(group.rows)
            kv_heads = _kv_heads(group.heads, query.shape[1] // self.key.shape[1])
            rate, start = self.pattern.dilation_rates[group.branch], cache.seq_len + group.rows.start
            queries = _Queries(signed[place], out[place], lse[place])
            of_queries = range(start, start + len(group.rows) * rate, rate)
            for rows, positions in cache.rows(group.begin, cache.seq_len, rate):
                band = None if group.band is None else group.band - (start - positions.start) // rate
                keys = _Keys.of(cache.key, cache.value, cache.ignored, rows, kv_heads)
                blocks = blocks_of_cached(len(group.rows), len(positions), positions.step // rate, band)
                self._attend(queries, keys, blocks, scale, self._pair_scores(group.heads, of_queries, positions))
            if number % ring.size == ring.rank:  # every rank has the keys of the new tokens
                keys = _Keys.of(self.key, self.value, ignored, as_slice(group.rows), kv_heads)
                blocks = _blocks(len(group.rows), len(group.rows), Band(below=group.band, above=0))
                self._attend(queries, keys, blocks, scale, self._pair_scores(group.heads, of_queries, of_queries))
        return out, lse

    def _pair_scores(self, heads: range, queries: range, keys: range) -> PairScores | None:
        """The score_mod of some heads, queries and keys, given by their positions; None without."""
        if self.score_mod is None:
            return None
        entries, numbers, of_queries, of_keys = (
            torch.arange(x.start, x.stop, x.step, device=self.query.device)
            for x in (range(self.query.shape[0]), heads, queries, keys)
        )
        return PairScores(self.score_mod, entries, numbers, of_queries[None, None], of_keys[None, None])

    def _attend(
        self, queries: _Queries, keys: _Keys, blocks: Iterator[Blocks], scale: float, pairs: PairScores | None
    ) -> None:
        """Attend from the queries to the keys, and merge the results into those so far."""
        for block in blocks:
            for part in block.parts:
                query, into_out, into_lse = (_rows_of(x, part.queries, block) for x in queries)
                key, value, mask = (None if x is None else _rows_of(x, part.keys, block) for x in keys)
                assert key is not None
                assert value is not None
                if block.repeats > 1:
                    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
                    mask = None if mask is None else mask.flatten(0, 1)
                rule = None if pairs is None else PairRule(scores=_of_part(pairs, part, block))
                is_causal = part.band == CAUSAL
                band = None if is_causal else part.band
                out, lse = forward_tile(self.kernel, TileInputs(query, key, value, scale, is_causal, mask, band, rule))
                if block.repeats > 1:
                    out, lse = (x.unflatten(0, (-1, block.repeats)) for x in (out, lse))
                merge_(into_out, into_lse, out, lse)

    def result(self, configuration: Configuration) -> tuple[Tensor, Tensor]:
        """The merged results of all ranks. They are the same on every rank, bit by bit.

        Raises:
            RingMismatchError, RingPeerError: the ranks' steps differ, or a rank is gone.
        """
        ring = self.cache.ring
        if ring.agreement is None:
            return self.local_result()
        call = ring.agreement.begin(configuration)
        ring.connect_all_gather(call, self.query)
        with ring.agreement.report_errors(call):
            out, lse = self.local_result()
            marks = self._marks().to(out.dtype)
        mine = torch.cat([out.transpose(1, 2).flatten(2), lse.transpose(1, 2), marks], -1)  # [batch, new tokens, …]
        width = max(1, MAX_EXCHANGED_BYTES // (ring.size * mine[:, :1].nbytes))
        heads, value_dim = out.shape[1], out.shape[3]
        for index, part in enumerate(mine.split(width, 1)):
            gathered = ring.all_gather(call, part.contiguous(), index)
            ring.synchronize()
            self._compare(gathered[..., -marks.shape[-1] :])
            begin = index * width
            into_out, into_lse = (x[:, :, begin : begin + part.shape[1]] for x in (out, lse))
            into_out.zero_()
            into_lse.fill_(-math.inf)
            for of_rank in gathered:
                of_out, of_lse, _ = of_rank.split([heads * value_dim, heads, marks.shape[-1]], -1)
                merge_(
                    into_out, into_lse, of_out.unflatten(2, (heads, value_dim)).transpose(1, 2), of_lse.transpose(1, 2)
                )
        return out, lse

    def _marks(self) -> Tensor:
        """What must be equal on all ranks, [batch, new tokens, 4]: each key's sum and norm, and the state of the cache.

        Ranks with different hardware may round keys differently, so equal bits are not required. The state is the
        length of the cache and a checksum of its edits, both modulo 2²⁴, which is exact in fp32.
        """
        keys = self.key.transpose(1, 2).flatten(2).double()
        weights = torch.arange(keys.shape[-1], device=keys.device, dtype=torch.float64).mul_(12.9898).cos_()
        state = (torch.full_like(keys[..., 0], number % 2**24) for number in (self.cache.seq_len, self.cache.edits))
        return torch.stack([keys @ weights, keys.norm(dim=-1), *state], -1)

    def _compare(self, marks: Tensor) -> None:
        """Refuse a step whose new tokens, or whose caches, differ between the ranks. ``marks`` is [ring size, …]."""
        sums, norms, lengths, edits = marks.unbind(-1)
        if bool((lengths != lengths[0]).any()):
            by_rank = ", ".join(f"rank {rank}: {int(x.flatten()[0])}" for rank, x in enumerate(lengths))
            raise RingMismatchError(
                f"the ranks differ in the length of the cache ({by_rank}); every rank must make the same calls."
            )
        if bool((edits != edits[0]).any()):
            raise RingMismatchError(
                "the ranks differ in the calls of truncate() and select_batch() of the cache; every rank must make the "
                "same calls with the same arguments."
            )
        differs = (sums - sums[0]).abs() > _TOLERANCE * norms[0]
        if bool(differs.any()):
            _, entry, token = (int(x) for x in differs.nonzero()[0])
            ranks = [rank for rank, of_rank in enumerate(differs) if bool(of_rank.any())]
            raise RingMismatchError(
                f"the ranks differ in the new tokens: the key of token {token} in batch entry {entry} differs between "
                f"rank 0 and ranks {ranks}; every rank must decode the same tokens, so draw them with one seed."
            )


def check_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ignored: Tensor | None,
    sinks: Tensor | None,
    score_mod: ScoreMod | None,
    cache: KeyValueCache,
    pattern: DilatedPattern,
    scale: float | None,
    kernel: str,
) -> Step:
    """Check the arguments of a step, [batch, new tokens, heads, head_dim].

    Raises:
        ValueError, TypeError: an argument is invalid, or does not fit the cache.
    """
    query, key, value = map(autocast, (query, key, value))
    check_tensors(query, key, value, ignored)
    check_sinks(sinks, query)
    check_cache(cache, key, value)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens: a step has at least one.")
    seq_len = cache.seq_len + query.shape[1]
    if cache.max_len is not None and seq_len > cache.max_len:
        raise ValueError(
            f"query has {query.shape[1]} tokens, but the cache has {cache.seq_len} of max_len = {cache.max_len}: make "
            "the cache with a larger max_len, or truncate it."
        )
    pattern.check(seq_len=seq_len, num_heads=query.shape[2])
    if score_mod is not None:
        check_score_mod(score_mod, query, seq_len, needs_gradients=False)
    has_mask = ignored is not None or cache.ignored is not None
    needs = KernelInputs(
        query.device,
        query.dtype,
        query.shape[3],
        has_key_mask=has_mask,
        needs_grad=False,
        is_step=True,
        score_mod=score_mod,
        value_dim=value.shape[3],
    )
    # No kernel that reads rows in place decodes, so a score_mod is not translated.
    chosen = select_kernel("math" if kernel == "auto" and score_mod is not None else kernel, needs)
    if chosen.reads_in_place:
        chosen = select_kernel("math", needs)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return Step(pattern, cache, chosen, scale, query, key, value, ignored, sinks is not None, score_mod)


def check_cache(cache: KeyValueCache, key: Tensor, value: Tensor) -> None:
    """Refuse keys and values, [batch, seq, key/value heads, …], that do not fit a cache with rows."""
    if cache.key is None or cache.value is None:
        return
    wanted = {
        "batch": (key.shape[0], cache.key.shape[0]),
        "key/value heads": (key.shape[2], cache.key.shape[1]),
        "head_dim": (key.shape[3], cache.key.shape[3]),
        "value_dim": (value.shape[3], cache.value.shape[3]),
        "dtype": (key.dtype, cache.key.dtype),
        "device": (key.device, cache.key.device),
    }
    for name, (given, own) in wanted.items():
        if given != own:
            which = "value" if name == "value_dim" else "key"
            raise ValueError(
                f"{which} has {name} = {given}, but the cache has {own}: pass {which}s like those that it holds."
            )


def configuration_of(step: Step, module_number: str) -> Configuration:
    """The fields of a step that must be the same on all ranks. They are the same in every step of one kind."""
    query, ignored = step.query, step.ignored
    return _configuration(
        step.pattern,
        (
            ("order of calls", f"decode {module_number}"),
            ("batch", query.shape[0]),
            ("heads", query.shape[1]),
            ("key/value heads", step.key.shape[1]),
            ("head_dim", query.shape[3]),
            ("value_dim", step.value.shape[3]),
            ("new tokens", query.shape[2]),
            ("dtype", str(query.dtype)),
            ("device", query.device.type),
            ("scale", step.scale),
            ("key_padding_mask", "none" if ignored is None else "given"),
            ("sinks", "given" if step.has_sinks else "none"),
            ("score_mod", "none" if step.score_mod is None else identity(step.score_mod)),
            ("captured by score_mod", "" if step.score_mod is None else captured_values(step.score_mod)),
        ),
    )


@lru_cache(maxsize=256)
def _configuration(pattern: DilatedPattern, fields: tuple[tuple[str, object], ...]) -> Configuration:
    return Configuration({**dict(fields), **asdict(pattern)})


def groups(pattern: DilatedPattern, num_heads: int, start: int, num_tokens: int) -> Iterator[Group]:
    """The groups of a step with ``num_tokens`` tokens from position ``start`` on, in the same order on every rank."""
    end = start + num_tokens
    for branch, r in enumerate(pattern.dilation_rates):
        w, band = pattern.segment_length(branch, ENDLESS), pattern.band(branch, ENDLESS)
        for segment in range(start // w, (end - 1) // w + 1):
            first = segment * w
            low, high = max(start, first), min(end, first + w)
            for offsets, heads in _heads_by_offsets(pattern, branch, num_heads):
                # Of many offsets, few have a new token.
                few = len(offsets) <= high - low
                for offset in offsets if few else [(position - first) % r for position in range(low, high)]:
                    begin = first + offset
                    rows = range(low + (begin - low) % r - start, high - start, r)
                    if rows:
                        seen = begin if band is None else max(begin, start + rows.start - band * r)
                        yield Group(branch, heads, seen, rows, band)


def blocks_of_cached(num_queries: int, num_keys: int, stride: int, below: int | None) -> Iterator[Blocks]:
    """Cut queries and earlier keys for the kernel. Query i sees key j if i − stride · j ≤ below; None: it sees all.

    Every ``stride``-th query sees one key less than the one before. Of keys that not all queries see, these queries see
    a triangle.
    """
    partly = 0 if below is None else min(num_keys, max(0, -((below - num_queries + 1) // stride)))
    if partly < num_keys:
        yield Blocks((Part(range(num_queries), range(partly, num_keys), None),))
    for first in range(min(stride, num_queries) if partly else 0):
        assert below is not None
        queries = range(first, num_queries, stride)
        for blocks in _blocks(len(queries), partly, Band(below=(below - first) // stride)):
            parts = (part._replace(queries=queries[as_slice(part.queries)]) for part in blocks.parts)
            yield blocks._replace(parts=tuple(parts))


def _blocks(num_queries: int, num_keys: int, band: Band) -> Iterator[Blocks]:
    """Cut a tile for kernels that compute triangles and rectangles."""
    limits = band.limits(num_queries, num_keys)
    if limits is None:
        yield Blocks((Part(range(num_queries), range(num_keys), None),))
    else:
        yield from cut_band(num_queries, num_keys, limits, max(num_queries, num_keys))


def _rows_of(tensor: Tensor, rows: range, blocks: Blocks) -> Tensor:
    """A view of rows of a tensor [batch, heads, rows, …]; of several blocks, [batch, blocks, heads, rows, …]."""
    if blocks.repeats == 1:
        return tensor[:, :, as_slice(rows)]
    stop = rows.stop + (blocks.repeats - 1) * blocks.step
    found = tensor[:, :, rows.start : stop].unfold(2, len(rows), blocks.step).transpose(1, 2)
    return found if tensor.dim() == 3 else found.transpose(3, 4)


def _of_part(pairs: PairScores, part: Part, blocks: Blocks) -> PairScores:
    """The score_mod of a part of the queries and keys."""
    batch, positions = len(pairs.batch), (pairs.query_positions, pairs.key_positions)
    of_queries, of_keys = (_rows_of(x, y, blocks) for x, y in zip(positions, (part.queries, part.keys), strict=True))
    if blocks.repeats > 1:
        of_queries, of_keys = (x.flatten(0, 1).repeat(batch, 1, 1) for x in (of_queries, of_keys))
    batches = pairs.batch.repeat_interleave(blocks.repeats)
    return replace(pairs, batch=batches, query_positions=of_queries, key_positions=of_keys)


@lru_cache(maxsize=256)
def _heads_by_offsets(pattern: DilatedPattern, branch: int, num_heads: int) -> tuple[tuple[range, range], ...]:
    """The offsets of a branch, and the heads with each. Their numbers have equal distances."""
    by_offsets: dict[range, list[int]] = {}
    for head in pattern.heads(branch, num_heads):
        by_offsets.setdefault(pattern.head_offsets(branch, head, num_heads, ENDLESS), []).append(head)
    return tuple((offsets, _as_range(heads)) for offsets, heads in by_offsets.items())


def _as_range(numbers: Sequence[int]) -> range:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    found = range(numbers[0], numbers[-1] + 1, step)
    assert [*found] == [*numbers], numbers
    return found


def _kv_heads(heads: range, group_size: int) -> slice | tuple[int, ...]:
    """The key/value heads of some heads, so that their order fits a kernel's grouped heads."""
    of_heads = tuple(head // group_size for head in heads)
    distinct = sorted(set(of_heads))
    per_head = len(of_heads) // len(distinct)
    if of_heads != tuple(head for head in distinct for _ in range(per_head)):
        return of_heads
    step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
    found = range(distinct[0], distinct[-1] + 1, step)
    return as_slice(found) if [*found] == distinct else tuple(distinct)


def _heads_of(tensor: Tensor, heads: slice | tuple[int, ...]) -> Tensor:
    """The chosen heads of a tensor [batch, heads, ...]."""
    if isinstance(heads, slice):
        return tensor[:, heads]
    return tensor.index_select(1, constant(heads, tensor))
