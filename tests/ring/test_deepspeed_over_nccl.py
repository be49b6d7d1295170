"""The suites of hops over the strict stand-in for NCCL, with the deepspeed adapter. No GPU runs here."""

from __future__ import annotations

from nccl_suites import BlockingHopTests, HopTests, blocking_worlds, pair, simulated_worlds, world

__all__ = ["blocking_worlds", "pair", "simulated_worlds", "world"]


class TestDeepSpeed(HopTests):
    adapter = "ring_backends.adapters.deepspeed"
    core_in_matrix = True


class TestDeepSpeedThatBlocks(BlockingHopTests):
    adapter = "ring_backends.adapters.deepspeed"
    core_in_matrix = True
