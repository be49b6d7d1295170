"""Ulysses × ring: heads are exchanged within a group, keys and values around the ring."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_backends.errors import RingMismatchError
from ring_backends.ring.topology import HOST_VARIABLE
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.rings import BY_HOSTS
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.training_runs import check_moves
from ring_backends.testing.world import on_every_rank

pytest.importorskip("deepspeed")

from deepspeed_cases import ADAPTER, NEEDS, SmallModel, one_step, one_step_alone

from ring_backends.adapters import deepspeed as backend
from ring_backends.adapters.deepspeed import ulysses


@cache
def ulysses_ring(ring_size: int, ulysses_size: int) -> Any:
    return backend.initialize(ring_size, timeout=timedelta(seconds=60), ulysses_size=ulysses_size)


every_group_size = pytest.mark.parametrize(
    ("ring_size", "ulysses_size"),
    [(4, 2), pytest.param(4, 4, marks=MORE_CASES), pytest.param(2, 2, marks=MORE_CASES)],
    ids=["ring 2 x 2", "ring 1 x 4", "data 2 x ring 1 x 2"],
)


ULYSSES_CASE = AttentionCase(48, (16, 48), (2, 4), batch=2, num_heads=8, num_kv_heads=4, dtype=torch.float64)


CASE_CHANGES: dict[str, dict[str, Any]] = {
    "mod": {},
    "a rate above the share of heads": {"dilation_rates": (3, 5), "is_causal": True},
    "block": {"offset": "block", "is_causal": True},
    "grouped": {"head_mode": "grouped", "is_causal": True},
    "phantoms": {"offset": "block", "padding": "zeros", "segment_lengths": (16, 48)},
    "windows": {"segment_lengths": (16, None), "window_lengths": (None, 9), "offset": "every", "is_causal": True},
    "sinks": {"sinks": True, "is_causal": True},
    "score_mod": {"score_mod": "distance", "is_causal": True},
    "causal mask": {"masked": "random", "is_causal": True},
}


class TestUlysses:
    @pytest.mark.parametrize("name", matrix_but(*[*CASE_CHANGES][::3], of=CASE_CHANGES))
    @pytest.mark.parametrize("layout", matrix_but("zigzag", of=("contiguous", "zigzag")))
    @every_group_size
    @on_every_rank
    def test_output_and_gradients_are_those_of_one_process(
        self, ring_size: int, ulysses_size: int, layout: LayoutKind, name: str
    ) -> None:
        case = replace(ULYSSES_CASE, **CASE_CHANGES[name])
        call = local_call(ADAPTER, ulysses_ring(ring_size, ulysses_size).with_layout(layout), case)
        assert torch.equal(call(), call(return_lse=True)[0])
        call.check(1e-10 if case.dtype == torch.float64 else 1e-4)

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    @on_every_rank
    def test_ulysses_groups_are_within_hosts(self, layout: LayoutKind) -> None:
        with mock.patch.dict(os.environ, {HOST_VARIABLE: BY_HOSTS.hosts[dist.get_rank()]}):
            timeout = timedelta(seconds=60)
            ring = backend.initialize(timeout=timeout, ulysses_size=2, ring_order="topology").with_layout(layout)
        rank = BY_HOSTS.rings[0].index(dist.get_rank())
        places = ring.rank, ring.hop_ring.ranks
        assert places == (rank, [(0, 1), (3, 2)][rank % 2]), places
        local_call(ADAPTER, ring, replace(ULYSSES_CASE, is_causal=True, masked="random")).check()

    @every_group_size
    @on_every_rank
    def test_sizes_positions_and_hops(self, ring_size: int, ulysses_size: int) -> None:
        """Ring size, data size, shards and positions are the same as without Ulysses. There are fewer hops."""
        ring, rank = ulysses_ring(ring_size, ulysses_size), dist.get_rank()
        ring.traffic.reset()
        local_call(ADAPTER, ring, replace(ULYSSES_CASE, segment_lengths=(48,), dilation_rates=(1,)))()
        x = torch.arange(48.0).view(1, 48)
        shard = ring.shard(x)
        torch.testing.assert_close(shard[0].long(), ring.positions(48))
        torch.testing.assert_close(ring.unshard(shard, seq_len=48), x)
        first = rank // ring_size * ring_size
        places = ring.size, ring.rank, ring.data_size, ring.data_rank
        assert places == (ring_size, rank - first, 4 // ring_size, rank // ring_size), places
        hop_ring = tuple(range(first + rank % ulysses_size, first + ring_size, ulysses_size))
        assert ring.hop_ring.ranks == hop_ring, ring.hop_ring
        assert ring.traffic.messages == len(hop_ring) - 1, ring.traffic

    @on_every_rank
    def test_hops_use_the_buffers_of_the_ring(self) -> None:
        ring = replace(ulysses_ring(4, 2), buffer_bytes=4096)
        with mock.patch.object(ulysses, "attend", wraps=ulysses.attend) as attend:
            local_call(ADAPTER, ring, replace(ULYSSES_CASE, buffer_bytes=4096))()
        assert attend.call_args.args[0].ring.buffer_bytes == 4096

    @THOROUGH
    @pytest.mark.parametrize("stage", matrix_but(3, of=range(4)))
    @on_every_rank
    def test_training(self, stage: int) -> None:
        """A step on a ring of four ranks with Ulysses groups of two."""
        ring = ulysses_ring(4, 2)
        check_moves(one_step(SmallModel(ring), ring, stage), one_step_alone(), 1e-6, f"ZeRO {stage}")

    @on_every_rank
    def test_unsupported_exchanges_are_refused(self) -> None:
        def attend(layout: LayoutKind = "contiguous", **changes: Any) -> Any:
            return local_call(ADAPTER, ulysses_ring(4, 2).with_layout(layout), replace(ULYSSES_CASE, **changes))()

        branches = {"segment_lengths": (8,) * 5, "dilation_rates": (1,) * 5, "head_mode": "grouped"}
        refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "ulysses_size = 0", lambda: backend.initialize(ulysses_size=0)),
            (ValueError, "ulysses_size = 3", lambda: backend.initialize(ulysses_size=3)),
            (TypeError, "ulysses_size = 2.0", lambda: backend.initialize(ulysses_size=2.0)),
            (
                ValueError,
                "ring_size = 'auto': ulysses_size = 2",
                lambda: backend.initialize("auto", ulysses_size=2, **NEEDS),
            ),
            (ValueError, "query has 3 heads with ulysses_size = 2", lambda: attend(num_heads=3, num_kv_heads=3)),
            (ValueError, "key has 1 heads with ulysses_size = 2", lambda: attend(num_heads=4, num_kv_heads=1)),
            (ValueError, "seq_len = 46 with ulysses_size = 2", lambda: attend(seq_len=46)),
            (ValueError, "a zigzag ring of 4 needs a multiple of 8", lambda: attend("zigzag", seq_len=44)),
            (ValueError, "head_mode='grouped' with 4 heads and 5 branches", lambda: attend(num_heads=4, **branches)),
        ]
        for error, message, call in refused:
            ending(call).check(error, message)

    @on_every_rank
    def test_ranks_that_disagree_are_reported_at_once(self) -> None:
        """Rank 3 has a larger batch, and then no autocast."""
        ring, case = backend.initialize(timeout=30, ulysses_size=2), replace(ULYSSES_CASE, dtype=torch.float32)
        batches = "batch (rank 0: 2, rank 1: 2, rank 2: 2, rank 3: 3)"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ring.rank != 3):
            other = replace(case, batch=3 if ring.rank == 3 else 2)
            ending(local_call(ADAPTER, ring, other)).check(RingMismatchError, batches)
            ended = ending(local_call(ADAPTER, ring, case))
        ended.check(RingMismatchError, "dtype (rank 0: torch.bfloat16", "rank 3: torch.float32")

    @on_every_rank
    def test_copies(self) -> None:
        call = local_call(ADAPTER, ulysses_ring(4, 2), ULYSSES_CASE)
        twin = replace(call, attention=copy.deepcopy(call.attention))
        pickled = replace(call, attention=pickle.loads(pickle.dumps(call.attention)))
        ending(pickled).check(RuntimeError, "initialize()")
        pickled.attention.ring = call.attention.ring
        for copied in (twin, pickled):
            assert torch.equal(copied(), call())


@pytest.mark.parametrize("how", ["check", "synchronize"])
def test_hops_of_the_inner_ring_are_checked(how: str) -> None:
    from ring_backends.adapters.deepspeed.ulysses import UlyssesRing

    hop_ring = mock.Mock()
    getattr(UlyssesRing(hop_ring=hop_ring), how)()
    getattr(hop_ring, how).assert_called_once_with()
