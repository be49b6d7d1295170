from __future__ import annotations

import pytest

# Before the plugin is imported, so that the harness's own assertions explain themselves.
pytest.register_assert_rewrite("ring_backends.testing")

pytest_plugins = ["ring_backends.testing.plugin"]
