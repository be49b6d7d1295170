from __future__ import annotations

from ring_backends.testing.suite import AdapterTests


class TestUnbatched(AdapterTests):
    adapter = "ring_backends_unbatched"
