from __future__ import annotations

import pytest

# This has to precede the import of the plugin, so that pytest rewrites the assertions of the harness.
pytest.register_assert_rewrite("ring_backends.testing")

pytest_plugins = ["ring_backends.testing.plugin"]
