"""How finely the plans for a type of device are cut. All ranks of a ring have devices of one type."""

from __future__ import annotations

from dataclasses import dataclass

TREE_SHARE = 0.10
"""Maximum size of the buffers of all rows on trees (:mod:`ring_backends.schedule.trees`), as a share of q, k, v, out
and their gradients, unless :attr:`Limits.buffer_bytes` is more."""


@dataclass(frozen=True)
class Limits:
    """Limits on how finely a plan cuts hops, heads and tiles.

    Attributes:
        communication_share: maximum size of all communication buffers, as a share of q, k, v, out and their gradients.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors.
        min_hop_bytes: minimum size of a hop after cutting. Smaller hops would save little memory, and most of their
            time would be latency, and launches of their tiles.
        min_block_bytes: minimum size of the query of a block of heads, unless the hops require smaller blocks. In bf16
            and fp16, the sums of a backward take more bytes than the gradients, and blocks of heads keep the sums
            small. None: heads are not cut for the sums. A forward never needs this cut, because it holds no gradients.
        min_tile_bytes: minimum size of the query of one kernel call.
        cuts_base: whether the tiles of a base branch are cut. If not, the result of one kernel call can become a result
            of the whole call without a copy.
    """

    communication_share: float
    buffer_bytes: int
    min_hop_bytes: int
    min_block_bytes: int | None
    min_tile_bytes: int
    cuts_base: bool


ON_CPU = Limits(0.05, 8 * 2**20, 2 * 2**20, 4 * 2**20, 2**20, cuts_base=True)

ON_ACCELERATOR = Limits(0.10, 512 * 2**20, 32 * 2**20, None, 64 * 2**20, cuts_base=False)
"""Launches and latencies would dominate the time of smaller hops and tiles.

In a replayed rank of 8 with 131,072 tokens, hops of at least 8 MiB cut the heads of a backward into ten blocks, and an
H100 computed for 11 % of the time.
"""


def limits_of(device_type: str) -> Limits:
    """The limits on a device of this type. Device "meta" stands for an accelerator."""
    return ON_CPU if device_type == "cpu" else ON_ACCELERATOR
