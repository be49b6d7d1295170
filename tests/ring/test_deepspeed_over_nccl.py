"""The suites of ring passes over the strict stand-in for NCCL, with the deepspeed adapter. No GPU runs here."""

from __future__ import annotations

from nccl_suites import RingPassTests, pair, simulated_worlds, world

__all__ = ["pair", "simulated_worlds", "world"]


class TestDeepSpeed(RingPassTests):
    adapter = "ring_backends.adapters.deepspeed"
