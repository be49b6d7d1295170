"""The ring pass of DeepSpeed: ``deepspeed.comm``'s point-to-point operations.

DeepSpeed's backend carries the hops, and its comms_logger records them. Each hop is one ``batch_isend_irecv``. Its
recorded size is the sum of the buffers that are sent and received. On a GPU the logger waits for every operation that
it records, so hops and tiles overlap only without the logger.
"""

from __future__ import annotations

from collections.abc import Mapping

import deepspeed
import deepspeed.comm as comm
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import Buffers
from ring_backends.ring.transfer import Transfer, post_works


def post_hop(ring: Ring, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
    """Post one hop: flat uint8 buffers to and from ring ranks."""
    group, ranks = ring.group, ring.ranks
    assert group is not None

    def post(outgoing: Buffers, incoming: Buffers) -> list[dist.Work]:
        # deepspeed.comm takes global ranks only.
        receives = [comm.P2POp(comm.irecv, x, ranks[peer], group=group, tag=tag) for peer, x in incoming]
        sends = [comm.P2POp(comm.isend, x, ranks[peer], group=group, tag=tag) for peer, x in outgoing]
        works: list[dist.Work] = comm.batch_isend_irecv([*receives, *sends])
        return works

    return post_works(group, post, outgoing, incoming, tag)


def start_deepspeed() -> None:
    """Start ``deepspeed.comm`` on the existing process group, unless it runs already.

    On CPU, DeepSpeed would compile a shared-memory all-reduce, which needs a compiler and takes minutes. This package
    does not use it. To have it, call ``deepspeed.init_distributed()`` first. DeepSpeed looks up the operators that it
    compiles in ``deepspeed.ops.__compatible_ops__``, so this function replaces that dict by an empty one meanwhile.
    """
    if comm.is_initialized():
        return
    operators = vars(deepspeed.ops)
    found = operators.get("__compatible_ops__")
    operators["__compatible_ops__"] = {}
    try:
        comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    finally:
        del operators["__compatible_ops__"]
        if found is not None:
            operators["__compatible_ops__"] = found
