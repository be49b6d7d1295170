"""One step of decoding: a few new tokens against a cache that is distributed over the ring.

Every rank has the same new tokens. It attends from them to its own rows of the cache, and the ranks exchange and merge
the results. A rank also computes a part of the attention among the new tokens. No keys and values are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_backends.engine.binding import Binding
from ring_backends.engine.cache import ENDLESS, KeyValueCache
from ring_backends.engine.call import AttentionInputs, cast_inputs, check_layout, check_tensors, fields_of
from ring_backends.errors import RingMismatchError
from ring_backends.kernels import Kernel, KernelInputs, PairRule, TileInputs, select_kernel
from ring_backends.kernels.constants import constant
from ring_backends.kernels.merge import merge_, merge_zero_value_, statistics_dtype
from ring_backends.kernels.per_tile import forward_tile
from ring_backends.kernels.score_mod import PairScores, check_score_mod
from ring_backends.kernels.steps import split_scale
from ring_backends.ring.calls import Configuration
from ring_backends.schedule.bands import CAUSAL, Band, Blocks, Part, as_slice, cut_band
from ring_backends.schedule.pattern import DilatedPattern

MAX_EXCHANGED_BYTES = 32 * 2**20
"""The most memory for results of all ranks at a time. The results of longer steps are exchanged in parts."""

Keys = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values, [batch, key/value heads, rows, …], and bool, True for a key to ignore."""

Heads = slice | tuple[int, ...]
"""An index of heads: a slice if possible."""

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


@dataclass(frozen=True)
class Step:
    """One checked step.

    Attributes:
        inputs: the tensors of the step, [batch, new tokens, …], cast by autocast.
    """

    binding: Binding
    cache: KeyValueCache
    kernel: Kernel
    scale: float
    inputs: AttentionInputs

    def local_result(self) -> tuple[Tensor, Tensor]:
        """out and LSE of the new tokens over this rank's keys, in the statistics dtype."""
        inputs, cache = self.inputs, self.cache
        query, key, value = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
        sign, scale = split_scale(self.scale)
        signed = query if sign == 1 else query * sign
        mask = inputs.key_padding_mask
        own = key, value, None if mask is None else mask.unsqueeze(1)
        shape = *inputs.query.shape[:3], inputs.value.shape[3]
        out = query.new_zeros(shape, dtype=statistics_dtype(query.dtype)).transpose(1, 2)
        lse = torch.full_like(out[..., 0], -math.inf)
        pattern, ring = self.binding.pattern, cache.ring
        for number, group in enumerate(groups(pattern, query.shape[1], cache.seq_len, query.shape[2])):
            heads = as_slice(group.heads)
            place = slice(None), heads, as_slice(group.rows)
            kv_heads = _kv_heads(group.heads, query.shape[1] // key.shape[1])
            rate, start = pattern.dilation_rates[group.branch], cache.seq_len + group.rows.start
            queries = signed[place], out[place], lse[place]
            of_queries = range(start, start + len(group.rows) * rate, rate)
            for rows, positions in cache.rows(group.begin, cache.seq_len, rate):
                band = None if group.band is None else group.band - (start - positions.start) // rate
                keys = _rows_of_keys((cache.key, cache.value, cache.ignored), rows, kv_heads)
                blocks = blocks_of_cached(len(group.rows), len(positions), positions.step // rate, band)
                self._attend(queries, keys, blocks, scale, self._pair_scores(group.heads, of_queries, positions))
            if number % ring.size == ring.rank:  # every rank has the keys of the new tokens
                keys = _rows_of_keys(own, as_slice(group.rows), kv_heads)
                blocks = _blocks(len(group.rows), len(group.rows), Band(below=group.band, above=0))
                self._attend(queries, keys, blocks, scale, self._pair_scores(group.heads, of_queries, of_queries))
        return out, lse

    def _pair_scores(self, heads: range, queries: range, keys: range) -> PairScores | None:
        """The score_mod of some heads, queries and keys, given by their positions; None without."""
        query, score_mod = self.inputs.query, self.inputs.score_mod
        if score_mod is None:
            return None
        entries, numbers, of_queries, of_keys = (
            torch.arange(x.start, x.stop, x.step, device=query.device)
            for x in (range(query.shape[0]), heads, queries, keys)
        )
        return PairScores(score_mod, entries, numbers, of_queries[None, None], of_keys[None, None])

    def _attend(
        self,
        queries: tuple[Tensor, Tensor, Tensor],
        keys: Keys,
        blocks: Iterator[Blocks],
        scale: float,
        pairs: PairScores | None,
    ) -> None:
        """Attend from queries to keys, and merge the results into out and LSE so far.

        Args:
            queries: query, out and LSE, [batch, heads, rows, …].
        """
        for block in blocks:
            for part in block.parts:
                query, into_out, into_lse = (_rows_of(x, part.queries, block) for x in queries)
                key, value = (_rows_of(x, part.keys, block) for x in keys[:2])
                mask = None if keys[2] is None else _rows_of(keys[2], part.keys, block)
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

    def result(self) -> tuple[Tensor, Tensor]:
        """The merged results of all ranks. They are the same on every rank, bit by bit.

        Raises:
            RingMismatchError, RingPeerError: the ranks' steps differ, or a rank is gone.
        """
        ring = self.cache.ring
        if ring.agreement is None:
            return self.local_result()
        call = ring.agreement.begin(self._configuration())
        ring.connect_all_gather(call, self.inputs.query)
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

    def _configuration(self) -> Configuration:
        """The fields that must be the same on all ranks. They are the same in every step of one kind."""
        fields = {
            "order of calls": f"decode {self.binding.name}",
            **fields_of(self.inputs),
            "new tokens": self.inputs.query.shape[1],
            "scale": self.scale,
        }
        return _kept_configuration(tuple(fields.items()), self.binding.pattern)

    def _marks(self) -> Tensor:
        """What must be equal on all ranks, [batch, new tokens, 4]: each key's sum and norm, and the state of the cache.

        Ranks with different hardware may round keys differently, so equal bits are not required. The state is the
        length of the cache and a checksum of its edits, both modulo 2²⁴, which is exact in fp32.
        """
        keys = self.inputs.key.flatten(2).double()
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


def decode(binding: Binding, cache: KeyValueCache, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Attend from new tokens to the cache and to each other, and add them to the cache.

    Args:
        inputs: the tensors, [batch, new tokens, …], and the score_mod of the step.

    Returns:
        out [batch, new tokens, heads, value_dim] in query's dtype, and LSE [batch, heads, new tokens].

    Raises:
        ValueError, TypeError: an argument is invalid, or does not fit the cache.
        RingMismatchError, RingPeerError: the ranks' steps differ, or a rank is gone.
    """
    with binding.ring.report_refusals():
        step = check_step(binding, cache, inputs)
    out, lse = step.result()
    inputs = step.inputs
    if inputs.sinks is not None:
        merge_zero_value_(out, lse, inputs.sinks[:, None])
    cache.append(inputs.key, inputs.value, inputs.key_padding_mask)
    return out.transpose(1, 2).to(inputs.query.dtype), lse


def check_prefill(binding: Binding, cache: KeyValueCache, inputs: AttentionInputs) -> int:
    """Check that a cache can keep the keys and values of a prompt, and return the length of the prompt.

    Raises:
        ValueError, TypeError: an argument is invalid, or does not fit the cache.
    """
    with binding.ring.report_refusals():
        _check_owner(binding, cache, inputs.dropout_p)
        if cache.seq_len:
            raise ValueError(f"cache has {cache.seq_len} tokens: prefill() begins a sequence; use decode().")
        inputs = cast_inputs(inputs)
        check_tensors(inputs)
        _check_sizes(cache, inputs.key, inputs.value)
        seq_len = check_layout(inputs.query.shape[1], inputs.seq_len, binding.ring).seq_len
        if cache.max_len is not None and seq_len > cache.max_len:
            raise ValueError(f"seq_len = {seq_len}: the cache has max_len = {cache.max_len}; make it larger.")
    return seq_len


def check_step(binding: Binding, cache: KeyValueCache, inputs: AttentionInputs) -> Step:
    """Check the arguments of a step, [batch, new tokens, heads, head_dim].

    Raises:
        ValueError, TypeError: an argument is invalid, or does not fit the cache.
    """
    _check_owner(binding, cache, inputs.dropout_p)
    inputs = cast_inputs(inputs)
    query, key, value, ignored = inputs.query, inputs.key, inputs.value, inputs.key_padding_mask
    check_tensors(inputs)
    _check_sizes(cache, key, value)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens: a step has at least one.")
    seq_len = cache.seq_len + query.shape[1]
    if cache.max_len is not None and seq_len > cache.max_len:
        raise ValueError(
            f"query has {query.shape[1]} tokens, but the cache has {cache.seq_len} of max_len = {cache.max_len}: make "
            "the cache with a larger max_len, or truncate it."
        )
    binding.pattern.check(seq_len=seq_len, num_heads=query.shape[2])
    score_mod = inputs.score_mod
    if score_mod is not None:
        check_score_mod(score_mod, query, seq_len, needs_gradients=False)
    needs = KernelInputs(
        query.device,
        query.dtype,
        query.shape[3],
        has_key_mask=ignored is not None or cache.ignored is not None,
        needs_grad=False,
        is_step=True,
        score_mod=score_mod,
        value_dim=value.shape[3],
    )
    # No kernel that reads rows in place decodes, so a score_mod is not translated.
    chosen = select_kernel("math" if binding.kernel == "auto" and score_mod is not None else binding.kernel, needs)
    if chosen.reads_in_place:
        chosen = select_kernel("math", needs)
    scale = query.shape[3] ** -0.5 if binding.scale is None else binding.scale
    return Step(binding, cache, chosen, scale, inputs)


def _check_owner(binding: Binding, cache: object, dropout_p: float) -> None:
    """Refuse a cache that was not made for this attention."""
    binding.ring.check_connected()
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"cache = {type(cache).__name__}: expected a cache of attention.new_cache().")
    if cache.ring is not binding.ring:
        rings = (f"a {ring.layout_kind} ring of {ring.size}" for ring in (cache.ring, binding.ring))
        raise ValueError(
            "cache was made for {}, but this module is on {}: make it with the module's new_cache().".format(*rings)
        )
    if cache.pattern != binding.pattern:
        raise ValueError(
            f"cache was made for {cache.pattern}, and this module has {binding.pattern}: make it with the module's "
            "new_cache()."
        )
    if cache.owner not in (None, binding.name):
        raise ValueError(
            f"cache holds the keys of module {cache.owner}, and this is module {binding.name}: make one cache for each "
            "module, with its new_cache()."
        )
    cache.owner = binding.name
    if dropout_p:
        raise ValueError(f"dropout_p = {dropout_p}: decoding has no dropout; call eval() on the module.")


def _check_sizes(cache: KeyValueCache, key: Tensor, value: Tensor) -> None:
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


@lru_cache(maxsize=256)
def _kept_configuration(fields: tuple[tuple[str, object], ...], pattern: DilatedPattern) -> Configuration:
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


def _kv_heads(heads: range, group_size: int) -> Heads:
    """The key/value heads of some heads, so that their order fits a kernel's grouped heads."""
    of_heads = tuple(head // group_size for head in heads)
    distinct = sorted(set(of_heads))
    per_head = len(of_heads) // len(distinct)
    if of_heads != tuple(head for head in distinct for _ in range(per_head)):
        return of_heads
    step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
    found = range(distinct[0], distinct[-1] + 1, step)
    return as_slice(found) if [*found] == distinct else tuple(distinct)


def _rows_of_keys(keys: tuple[Tensor | None, Tensor | None, Tensor | None], rows: slice, heads: Heads) -> Keys:
    """The rows of some heads. The mask of ``keys`` is [batch, 1, rows]."""
    key, value, ignored = (None if x is None else x[:, :, rows] for x in keys)
    assert key is not None
    assert value is not None
    if isinstance(heads, slice):
        key, value = key[:, heads], value[:, heads]
    else:
        key, value = (x.index_select(1, constant(heads, x)) for x in (key, value))
    return key, value, None if ignored is None else ignored.expand(-1, key.shape[1], -1)
