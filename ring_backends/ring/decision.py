"""A decision that rank 0 makes for all ranks of the world, through the world's store.

It needs no ring, so that ranks can use it before they know their rings. Collectives of Python objects would need NumPy;
the store does not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError

_DECISION_GRACE = timedelta(seconds=30)
"""How much longer than rank 0 the other ranks wait, so that rank 0 can name the ranks that did not come."""

_decisions = itertools.count()
_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "RingMismatchError": RingMismatchError}


def decide_on_rank0(
    report: Mapping[str, Any], decide: Callable[[list[dict[str, Any]]], Any], timeout: timedelta
) -> Any:
    """Let rank 0 decide something from the reports of all ranks, and return the decision on every rank.

    All ranks of the world make this call, and all such calls in the same order.

    Args:
        report: this rank's report, of JSON-serializable values.
        decide: called on rank 0 with the reports of all ranks, by global rank. It returns a JSON-serializable value.
        timeout: how long rank 0 waits for the reports.

    Raises:
        ValueError, RingMismatchError: ``decide`` raised it on rank 0. Every rank raises it.
        RingPeerError: a rank did not make the call within ``timeout``.
    """
    world = dist.group.WORLD
    assert world is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"ring_backends/decision/{next(_decisions)}", world.get_group_store())
    keys = [str(other) for other in range(size)]
    store.set(keys[rank], json.dumps(report))
    if rank == 0:
        try:
            store.wait(keys, timeout)
            decision: dict[str, Any] = {"decision": decide([json.loads(text) for text in store.multi_get(keys)])}
        except dist.DistError:
            absent = [other for other in range(size) if not store.check([keys[other]])]
            decision = {
                "error": "RingPeerError",
                "message": f"rank {', '.join(map(str, absent))} did not call initialize() with ring_size='auto' or "
                f"ring_order='topology' within {timeout.total_seconds():g} s; every rank of the world must.",
            }
        except (ValueError, RingMismatchError) as error:
            decision = {"error": type(error).__name__, "message": str(error)}
        store.set("decision", json.dumps(decision))
    else:
        try:
            store.wait(["decision"], timeout + _DECISION_GRACE)
        except dist.DistError as error:
            raise RingPeerError(
                f"rank {rank} waited in initialize() for rank 0 to choose the rings, and received no decision within "
                f"{(timeout + _DECISION_GRACE).total_seconds():g} s: {error}. Look at the log of rank 0."
            ) from error
        decision = json.loads(store.get("decision"))
    if "error" in decision:
        raise _ERRORS.get(decision["error"], RingPeerError)(decision["message"])
    return decision["decision"]
