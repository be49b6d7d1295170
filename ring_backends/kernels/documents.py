"""Cuts a tile at the ends of packed documents.

A part whose queries and keys have no document in common is left out. A part within one document has no rule. So kernels
need not support documents, and hidden parts cost nothing.

Cuts depend on the values of the document numbers. To read them on a GPU, the host would have to wait for it at every
tile, and on device "meta" they have no values. So only tensors on the CPU are cut. Elsewhere the whole tile is one
part, in which several documents may meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ring_backends.kernels.tile import PairRule, TileInputs
from ring_backends.torch_internals import has_values

BLOCK = 256
"""Rows and keys per block if documents are too short to cut at their ends."""

MIN_MEAN_RUN = 32
"""A tile is cut at the ends of documents if they have at least this many rows on average."""


def document_parts(tile: TileInputs, rule: PairRule) -> Iterator[tuple[slice, slice, slice, TileInputs]]:
    """Yield the parts of a tile with documents: batch, rows, keys and inputs, with a rule if several documents meet."""
    for batch, rows, keys, is_causal, some_rule in _cuts(rule, tile.is_causal):
        mask = None if tile.key_mask is None else tile.key_mask[batch, :, keys]
        tensors = tile.query[batch, :, rows], tile.key[batch, :, keys], tile.value[batch, :, keys]
        yield batch, rows, keys, TileInputs(*tensors, tile.scale, is_causal, mask, rule=some_rule)


def _cuts(rule: PairRule, is_causal: bool) -> Iterator[tuple[slice, slice, slice, bool, PairRule | None]]:
    """Yield (batch, rows, keys, whether the causal diagonal crosses them, their rule if several documents meet)."""
    assert rule.query_documents is not None
    assert rule.key_documents is not None
    everything = slice(None)
    if rule.query_documents.device.type != "cpu" or not has_values(rule.query_documents):
        yield everything, everything, everything, is_causal, rule
        return
    for batch, is_of_one in _batch_parts(rule.query_documents, rule.key_documents):
        if is_of_one:
            yield batch, everything, everything, is_causal, None
            continue
        queries, keys = rule.query_documents[batch], rule.key_documents[batch]
        both = (queries, keys)
        first, last, row_blocks = _bounds(queries, *(both if is_causal else (queries,)))
        first_key, last_key, key_blocks = _bounds(keys, *(both if is_causal else (keys,)))
        meet = (last[:, None] >= first_key) & (first[:, None] <= last_key)
        if is_causal:
            meet = meet.tril()
        mixed = (first != last)[:, None] | (first_key != last_key) | (first[:, None] != first_key)
        where = meet.nonzero()
        met = zip(where.tolist(), mixed[where[:, 0], where[:, 1]].tolist(), strict=True)
        blocks = ((row, is_causal and row == key, is_mixed, key_blocks[key]) for (row, key), is_mixed in met)
        for (row, on_diagonal, is_mixed), group in groupby(blocks, key=lambda block: block[:3]):
            rows = row_blocks[row]
            for stretch in _joined([block for *_, block in group]):
                yield batch, rows, stretch, on_diagonal, rule.part(batch, rows, stretch) if is_mixed else None


def _batch_parts(queries: Tensor, keys: Tensor) -> list[tuple[slice, bool]]:
    """Cut the batch into parts. Return each part, and whether every sequence of the part is a single document.

    If all sequences have the same documents, the whole batch is one part. Otherwise, neighbouring sequences that are a
    single document each form one part. Every other sequence is a part of its own.
    """
    if all(bool((x[1:] == x[:-1]).all()) for x in (queries, keys)):
        return [(slice(None), False)]
    both = torch.cat([queries.flatten(1), keys.flatten(1)], 1)
    parts: list[tuple[slice, bool]] = []
    for index, is_of_one in enumerate((both == both[:, :1]).all(1).tolist()):
        if is_of_one and parts and parts[-1][1]:
            parts[-1] = slice(parts[-1][0].start, index + 1), True
        else:
            parts.append((slice(index, index + 1), is_of_one))
    return parts


def _bounds(documents: Tensor, *all_documents: Tensor) -> tuple[Tensor, Tensor, list[slice]]:
    """Cut ``documents`` [B, H, S] along S at each change of document in any head of any of ``all_documents``.

    If documents change often, the blocks have equal sizes instead.

    Returns:
        The lowest document number of each block, the highest, and the blocks.
    """
    length = documents.shape[2]
    changes = torch.stack([(x[:, :, 1:] != x[:, :, :-1]).flatten(0, 1).any(0) for x in all_documents]).any(0)
    cuts: list[int] = (changes.nonzero().squeeze(1) + 1).tolist()
    if len(cuts) * MIN_MEAN_RUN > length:
        cuts = [*range(BLOCK, length, BLOCK)]
        ends = [torch.stack(block.aminmax()) for block in documents.split(BLOCK, dim=2)]
        first, last = torch.stack(ends).unbind(1)
    else:  # each head has one document per block
        starts = torch.tensor([0, *cuts], device="cpu")
        first, last = documents.index_select(2, starts).flatten(0, 1).aminmax(dim=0)
    return first, last, [slice(start, stop) for start, stop in pairwise([0, *cuts, length])]


def _joined(slices: list[slice]) -> list[slice]:
    """Join adjacent slices."""
    joined: list[slice] = []
    for part in slices:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
