"""Every adapter on several hosts with bad networks. Adapters without an installed framework are skipped."""

from __future__ import annotations

import pytest

from ring_backends.testing.across_hosts import HostTests, hosts

__all__ = ["hosts"]

pytestmark = pytest.mark.matrix(reason="waits for slow networks, and needs root")


class TestNative(HostTests):
    adapter = "ring_backends.adapters.native"


class TestFSDP(HostTests):
    adapter = "ring_backends.adapters.fsdp"
    core_in_matrix = True


class TestDeepSpeed(HostTests):
    adapter = "ring_backends.adapters.deepspeed"
    core_in_matrix = True


class TestFairScale(HostTests):
    adapter = "ring_backends.adapters.fairscale"
    core_in_matrix = True
