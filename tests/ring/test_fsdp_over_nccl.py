"""The suites of hops over the strict stand-in for NCCL, with the fsdp adapter. No GPU runs here."""

from __future__ import annotations

from nccl_suites import BlockingHopTests, HopTests, blocking_worlds, pair, simulated_worlds, world

__all__ = ["blocking_worlds", "pair", "simulated_worlds", "world"]


class TestFSDP(HopTests):
    adapter = "ring_backends.adapters.fsdp"
    core_in_matrix = True


class TestFSDPThatBlocks(BlockingHopTests):
    adapter = "ring_backends.adapters.fsdp"
    core_in_matrix = True
