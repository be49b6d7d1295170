"""Which document and which random numbers a rank gets, when it trains over data × ring.

The ranks of one ring share a document, of which each holds a part; different rings train on different documents. So
there are two kinds of randomness, and two seeds, both of which follow from the one that the user gives:

- What has to be alike on every rank takes the seed as it is, everywhere: the initial parameters
  (``torch.manual_seed(seed)`` before the model is built) and the order of the documents (:func:`ring_sampler`).
- What happens to the tokens that a rank holds, such as dropout, takes :func:`rank_seed`
  (``torch.manual_seed(rank_seed(seed, ring))`` once the model is built). Ranks hold different tokens; with one seed
  they would drop the same units at the n-th token of every shard.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from ring_backends.ring import Ring


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
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed = {seed!r}: expected an int; convert it with int().")
    # Far apart for neighbouring seeds: with seed + rank, rank 1 of one run would repeat rank 0 of the next. Ranks are
    # next to each other, since CPU generators read the lowest 32 bits alone, which must not coincide.
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return (start + ring.ranks[ring.rank]) % 2**63
