"""The shared test harness, installed as ``ring_backends.testing`` for the tests of every adapter.

Nothing in ``ring_backends`` imports it, so that pytest and hypothesis are needed by tests alone.
"""
