"""The shared test harness, installed as ``ring_backends.testing`` for the tests of every adapter.

It holds the dense reference, the test suites that adapters inherit, and processes to run them in. It may import all of
``ring_backends``. Nothing in ``ring_backends`` imports it, so only tests need pytest and hypothesis.
"""
