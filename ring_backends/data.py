"""Documents and random seeds for data-parallel training over several rings.

The ranks of one ring share a document, and each holds a part of it. Different rings train on different documents. So
one run needs two kinds of seeds:

- The same seed on every rank, for the initial parameters (``torch.manual_seed(seed)`` before the model is built) and
  for the order of the documents (:func:`ring_sampler`).
- A different seed per rank (:func:`rank_seed`), for random operations on a rank's own tokens, such as dropout. Call
  ``torch.manual_seed(rank_seed(seed, ring))`` after the model is built. With equal seeds the ranks would drop the same
  units at the n-th token of every shard.

For attention dropout, pass a ``dropout_seed`` to the call of attention, for example a number made of step and layer, so
that each layer has another seed. If every rank of a ring passes the same seed, the dropped weights do not depend on the
ring size. Without a ``dropout_seed``, each rank draws one from torch's CPU generator.

:func:`document_ids` numbers the documents of a packed sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer

_GROUPS_PER_WINDOW = 32


def ring_sampler(
    dataset: Dataset[Any],
    ring: Ring,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
    weights: Tensor | Sequence[float] | None = None,
) -> DistributedSampler[Any]:
    """Distribute the documents of a data set over the rings. All ranks of a ring get the same ones, in the same order.

    Args:
        dataset: a map-style data set with a length. An item is a whole document; cut it with ``ring.shard``.
        ring: this rank's ring.
        shuffle: whether to use a random order, which changes with each ``set_epoch``.
        seed: seed of the random order, the same on every rank.
        drop_last: what to do if the number of rings does not divide the number of documents. True leaves the last
            documents out, False repeats the first ones. In both cases all rings get the same number of documents.
        lengths: [documents], the length of each document, such as its number of tokens. The rings then work on
            documents of similar length at the same time, so that they wait less for each other at the end of a step.
            The order stays random: 32 documents per ring are sorted at a time, and the steps are shuffled. With
            ``shuffle=False`` all documents are sorted.
        weights: [documents], not negative: draw as many documents as the data set has, with replacement, each with a
            probability proportional to its weight, as ``torch.utils.data.WeightedRandomSampler`` does.

    Returns:
        A sampler for ``torch.utils.data.DataLoader(dataset, sampler=…)``. Call its ``set_epoch(epoch)`` before each
        epoch.

    Raises:
        ValueError: ``lengths`` or ``weights`` has another number of elements than ``dataset`` or is negative, or
            ``weights`` is given with ``shuffle=False``.

    >>> list(ring_sampler(range(6), Ring(data_size=2, data_rank=1), shuffle=False))  # the second of two rings
    [1, 3, 5]
    >>> list(ring_sampler(range(6), Ring(data_size=2, data_rank=1), shuffle=False, lengths=[9, 70, 8, 4, 80, 5]))
    [5, 0, 4]
    """
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    sampler = _RingSampler(dataset, num_replicas=ring.data_size, rank=ring.data_rank, **options)
    for name, values in (("lengths", lengths), ("weights", weights)):
        if values is not None:
            setattr(sampler, name, _checked(name, values, len(dataset)))  # type: ignore[arg-type]
    if weights is not None and not shuffle:
        raise ValueError("weights with shuffle = False: weighted documents are drawn at random; leave shuffle on.")
    return sampler


def _checked(name: str, values: Tensor | Sequence[float], num_documents: int) -> Tensor:
    """``lengths`` or ``weights`` of a sampler in fp64: [documents]."""
    found = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if found.shape != (num_documents,):
        raise ValueError(f"{name} is {[*found.shape]}: expected one element per document, {[num_documents]}.")
    if not (found >= 0).all() or not found.isfinite().all() or not found.sum() > 0:
        raise ValueError(
            f"{name} has values from {found.min():g} to {found.max():g}: expected numbers from 0, not all 0."
        )
    return found


class _RingSampler(DistributedSampler[Any]):
    """A DistributedSampler over rings that can order documents by their lengths, and draw them by weights."""

    lengths: Tensor | None = None
    weights: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.lengths is None and self.weights is None:
            return super().__iter__()
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        if self.weights is not None:
            order = torch.multinomial(self.weights, self.total_size, replacement=True, generator=generator)
        else:
            count = len(self.dataset)  # type: ignore[arg-type]
            order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
            order = order[torch.arange(self.total_size) % count]
        if self.lengths is not None:
            order = self._by_length(order, self.lengths, generator)
        return iter(order[self.rank :: self.num_replicas].tolist())

    def _by_length(self, order: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
        """Put documents of similar length into the same group, which has one document for each ring."""
        window = _GROUPS_PER_WINDOW * self.num_replicas if self.shuffle else len(order)
        windows = [part[lengths[part].argsort(stable=True)] for part in order.split(window)]
        groups = torch.cat(windows).view(-1, self.num_replicas)
        if self.shuffle:
            groups = groups[torch.randperm(len(groups), generator=generator)]
            # No ring gets the longer document of every group.
            groups = groups.gather(1, torch.rand(groups.shape, generator=generator).argsort(1))
        return groups.flatten()


def rank_seed(seed: int, ring: Ring) -> int:
    """A seed for random operations on this rank's own tokens; distinct per rank of the world and per ``seed``.

    Args:
        seed: the run's seed, the same on every rank.
        ring: this rank's ring.

    Returns:
        0 … 2**63 − 1, for ``torch.manual_seed``. It depends only on ``seed`` and the global rank.

    >>> rank_seed(0, Ring(size=2, rank=1, ranks=(0, 1))) - rank_seed(0, Ring(size=2, rank=0, ranks=(0, 1)))
    1
    """
    check_integer("seed", seed)
    # The hash separates neighbouring seeds: with seed + rank, rank 1 of a run with seed 0 would repeat rank 0 of a run
    # with seed 1. The seeds of one run's ranks are consecutive: CPU generators use only the lowest 32 bits of a seed,
    # and these differ between consecutive seeds.
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return (start + ring.ranks[ring.rank]) % 2**63


def document_ids(cu_seqlens: Tensor | Sequence[int], seq_len: int) -> Tensor:
    """Number the documents of a packed sequence, for the argument ``document_ids`` of an attention.

    Args:
        cu_seqlens: cumulative lengths, as variable-length kernels take them: 0, then the end of each document. Equal
            neighbours mean an empty document.
        seq_len: length of the whole sequence. Positions after the last document are padding.

    Returns:
        int32 [1, seq_len], on the device of ``cu_seqlens``. It holds the document number of each position, counted from
        0, and −1 for padding. Cut it with ``ring.shard``, like the tokens.

    Raises:
        ValueError: ``cu_seqlens`` does not begin with 0, decreases, or exceeds ``seq_len``; or it is a tensor of
            another shape or dtype.
        TypeError: ``cu_seqlens`` holds something other than ints.
    """
    check_integer("seq_len", seq_len)
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {[*cu_seqlens.shape]}: expected int32 or int64 [documents + 1]."
        )
    numbers = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    is_sequence = isinstance(numbers, Sequence) and not isinstance(numbers, str) and len(numbers) > 0
    if not is_sequence or any(not isinstance(number, int) or isinstance(number, bool) for number in numbers):
        raise TypeError(f"cu_seqlens = {cu_seqlens!r}: expected ints, the first of them 0; convert them with int().")
    bounds = torch.as_tensor(cu_seqlens)
    if numbers[0] != 0 or any(later < earlier for earlier, later in pairwise(numbers)) or numbers[-1] > seq_len:
        raise ValueError(
            f"cu_seqlens = {numbers if len(numbers) < 9 else [*numbers[:4], '…', *numbers[-4:]]} with seq_len = "
            f"{seq_len}: must begin with 0, never decrease, and not exceed seq_len; give 0 and then the end of "
            "each document."
        )
    ids = torch.searchsorted(bounds[1:].contiguous(), torch.arange(seq_len, device=bounds.device), right=True)
    return ids.masked_fill(ids == len(numbers) - 1, -1).to(torch.int32).unsqueeze(0)
