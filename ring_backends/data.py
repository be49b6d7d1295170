"""Which document and which random numbers a rank gets, when it trains over data × ring.

The ranks of one ring share a document, of which each holds a part; different rings train on different documents. So
there are two kinds of randomness, and two seeds, both of which follow from the one that the user gives:

- What has to be alike on every rank takes the seed as it is, everywhere: the initial parameters
  (``torch.manual_seed(seed)`` before the model is built) and the order of the documents (:func:`ring_sampler`).
- What happens to the tokens that a rank holds, such as dropout, takes :func:`rank_seed`
  (``torch.manual_seed(rank_seed(seed, ring))`` once the model is built). Ranks hold different tokens; with one seed
  they would drop the same units at the n-th token of every shard.

Attention dropout belongs to neither: the attention weight of two tokens is dropped or not whichever rank holds them.
Its call takes a ``dropout_seed``, such as the number of the step: with one that is the same on every rank of a ring,
what is dropped does not depend on the ring's size.

:func:`document_ids` numbers the documents of a packed sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer


def ring_sampler(
    dataset: Dataset[Any], ring: Ring, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[Any]:
    """Deal the documents of a data set out to the rings: the same ones to all ranks of a ring, in the same order.

    Args:
        dataset: a map-style data set with a length; an item is a whole document, to be cut with ``ring.shard``.
        ring: this rank's ring.
        shuffle: whether to draw the documents in random order, a new one after each ``set_epoch``.
        seed: of that order; the same on every rank.
        drop_last: where the number of rings does not divide that of the documents, leave the last ones out. Else the
            first ones come once more, so that all rings get equally many.

    Returns:
        A sampler for ``torch.utils.data.DataLoader(dataset, sampler=…)``. Call its ``set_epoch(epoch)`` before each
        pass.

    >>> list(ring_sampler(range(6), Ring(data_size=2, data_rank=1), shuffle=False))  # the second of two rings
    [1, 3, 5]
    """
    return DistributedSampler(
        dataset,
        num_replicas=ring.data_size,
        rank=ring.data_rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def rank_seed(seed: int, ring: Ring) -> int:
    """A seed for what happens to this rank's own tokens: another one on every rank of the world, and for every seed.

    Args:
        seed: the run's seed, the same on every rank.
        ring: this rank's ring.

    Returns:
        0 … 2**63 − 1, for ``torch.manual_seed``. It stays the same from run to run, on the same global rank.

    >>> rank_seed(0, Ring(size=2, rank=1, ranks=(0, 1))) - rank_seed(0, Ring(size=2, rank=0, ranks=(0, 1)))
    1
    """
    check_integer("seed", seed)
    # Far apart for neighbouring seeds: with seed + rank, rank 1 of one run would repeat rank 0 of the next. Ranks are
    # next to each other, since CPU generators read the lowest 32 bits alone, which must not coincide.
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return (start + ring.ranks[ring.rank]) % 2**63


def document_ids(cu_seqlens: Tensor | Sequence[int], seq_len: int) -> Tensor:
    """Number the documents of a packed sequence, for the ``document_ids`` of an attention's call.

    Args:
        cu_seqlens: where each document begins, and where the last one ends: 0, then rising, as kernels for sequences of
            various lengths take them. Equal neighbours are an empty document.
        seq_len: length of the whole sequence; what is left behind the last document is padding.

    Returns:
        int32 [1, seq_len], on the device of ``cu_seqlens``: 0 for the rows of the first document, and so on; −1 for
        padding. Cut it with ``ring.shard`` like the tokens.

    Raises:
        ValueError, TypeError: the bounds do not rise from 0, or end behind the sequence.
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
            f"{seq_len}: must begin with 0, never fall, and end at seq_len or before; give where documents begin, and "
            "where the last one ends."
        )
    ids = torch.searchsorted(bounds[1:].contiguous(), torch.arange(seq_len, device=bounds.device), right=True)
    return ids.masked_fill(ids == len(numbers) - 1, -1).to(torch.int32).unsqueeze(0)
