"""The suites of hops over the strict stand-in for NCCL, with the deepspeed adapter. No GPU runs here."""

from __future__ import annotations

from nccl_suites import HopTests, pair, simulated_worlds, world

__all__ = ["pair", "simulated_worlds", "world"]


class TestDeepSpeed(HopTests):
    adapter = "ring_backends.adapters.deepspeed"
    core_in_matrix = True
