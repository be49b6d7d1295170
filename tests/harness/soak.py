"""Long training with changing lengths, layouts, patterns and masks: memory does not grow, replicas stay equal."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.ring.ring import Ring
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.rings import FOUR, LAYOUTS, TWO, RingSpec, backend, ring_of
from ring_backends.testing.world import World

MAX_LEN = 256
PATTERNS = (
    {"segment_lengths": (16, 64, 256), "dilation_rates": (1, 2, 4)},
    {"segment_lengths": (256,), "dilation_rates": (1,)},
    {"segment_lengths": (33, 100), "dilation_rates": (3, 7), "offset": "block"},
    {"segment_lengths": (32, 128), "dilation_rates": (1, 4), "head_mode": "grouped", "padding": "zeros"},
)
_VOCABULARY, _HEADS, _WIDTH = 13, 4, 32


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library: sizes in bytes, and counts."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]

    @classmethod
    def now(cls) -> _MallInfo:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = cls
        info: _MallInfo = mallinfo2()
        return info


def _counts_allocations() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")


@dataclass(frozen=True)
class Held:
    """The resources of a process after a step.

    Attributes:
        allocated_bytes: what ``malloc`` has given out and not got back. The resident set also has its free pieces, and
            grows by megabytes where nothing leaks.
    """

    allocated_bytes: int
    files: int
    threads: int
    groups: int

    @classmethod
    def now(cls) -> Held:
        allocations = _MallInfo.now()
        threads = len(os.listdir("/proc/self/task"))
        assert threads >= threading.active_count()
        files = len(os.listdir("/proc/self/fd"))
        groups = len(dist.distributed_c10d._world.pg_names)
        return cls(allocations.uordblks + allocations.hblkhd, files, threads, groups)


class _Model(nn.Module):
    """A block with several attention modules. Each step uses one of them."""

    def __init__(self, adapter: str, ring: Ring) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Embedding(MAX_LEN, _WIDTH)
        self.projections = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        make = backend(adapter).RingDilatedAttention
        self.attentions = nn.ModuleList(
            make(**pattern, ring=ring.with_layout(layout)) for pattern in PATTERNS for layout in LAYOUTS
        )

    def forward(self, tokens: Tensor, positions: Tensor, which: int, options: dict[str, Any]) -> Tensor:
        x = self.embedding(tokens) + self.places(positions)
        query, key, value = self.projections(x).unflatten(-1, (3, _HEADS, -1)).unbind(-3)
        logits: Tensor = self.head(x + self.attentions[which](query, key, value, **options).flatten(-2))
        return logits


def train_long(
    adapter: str, rings: RingSpec, num_steps: int, options: Mapping[str, Any]
) -> tuple[list[Held], list[float], dict[str, Tensor]]:
    """Train. Returns the resources of every step, the losses and the parameters."""
    ring = ring_of(adapter, rings)
    torch.manual_seed(0)
    model = _Model(adapter, ring)
    state = backend(adapter).parallelize(model, lambda x: torch.optim.SGD(x, lr=0.05), ring, **options)
    ring_generator, quarter = torch.Generator().manual_seed(ring.data_rank), num_steps // 4
    held, losses = [], []
    for step in range(num_steps):
        # Equal on all ranks. All quarters have the same steps, so that caches are full after the first quarter.
        alike = random.Random(step % quarter)
        which, seq_len = alike.randrange(len(PATTERNS) * len(LAYOUTS)), alike.randint(1, MAX_LEN)
        ring = ring.with_layout(LAYOUTS[which % len(LAYOUTS)])
        call: dict[str, Any] = {"is_causal": alike.random() < 0.5, "seq_len": seq_len}
        tokens = torch.randint(_VOCABULARY, (alike.randint(1, 3), seq_len), generator=ring_generator)
        if alike.random() < 0.5:
            call["key_padding_mask"] = ring.shard(torch.rand(tokens.shape, generator=ring_generator) < 0.3)
        if alike.random() < 0.3 and "padding" not in PATTERNS[which // len(LAYOUTS)]:
            call["document_ids"] = ring.shard(torch.randint(-1, 3, tokens.shape, generator=ring_generator))
        tokens, labels = ring.shard(tokens), ring.shard(tokens.flip(1))
        if step == num_steps - 3 and dist.get_rank() == 1:
            time.sleep(1)  # the others ask the store whether it has failed, which must leave nothing
        logits = state.model(tokens, ring.positions(seq_len), which, call)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        state.backward(state.loss(loss, labels.numel()))
        state.step()
        gc.collect()
        held.append(Held.now())
        losses.append(float(loss.detach()))
    return held, losses, state.full_state_dict()


_EXACT_ALLOCATIONS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "TORCH_FR_BUFFER_SIZE": "0"}
"""malloc counts what it keeps for each thread as given out: up to 240 KiB, which differ from run to run. And torch's
flight recorder would keep the last 2,000 collective calls, which fills some megabytes slowly."""


@core
@requires("training")
class SoakTests(AdapterSuite):
    @pytest.mark.skipif(not _counts_allocations(), reason="needs mallinfo2() of glibc 2.33")
    @pytest.mark.matrix(reason="takes 120 steps of training")
    @pytest.mark.timeout(1200)
    def test_memory_and_handles_do_not_grow(self, soak: int) -> None:
        num_steps, rings = 120 * soak, TWO if soak == 1 else FOUR
        with World(4, environment=_EXACT_ALLOCATIONS) as ranks:
            by_rank = ranks.run(train_long, self.adapter, rings, num_steps, self.framework_options, timeout=1100)
        quarter = num_steps // 4
        for held, losses, _ in by_rank:
            second, last = held[quarter : 2 * quarter], held[-quarter:]
            allocated = [statistics.median(h.allocated_bytes for h in held) for held in (second, last)]
            steps_between = num_steps - 2 * quarter
            assert allocated[1] - allocated[0] < 2**10 * steps_between, f"{allocated} bytes are allocated"
            for what in ("files", "groups"):
                assert max(getattr(h, what) for h in last) <= max(getattr(h, what) for h in second), what
            # On a busy machine, a rank that waits long asks the store in a thread, which lives for a moment.
            assert statistics.median(h.threads for h in last) <= max(h.threads for h in second)
            assert all(loss < 1e6 for loss in losses)  # also fails on NaN
        first, *others = (parameters for *_, parameters in by_rank)
        for parameters in others:
            torch.testing.assert_close(parameters, first, rtol=0, atol=0)
