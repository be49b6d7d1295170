"""Measures one attention call with every adapter, with all-gather and on one rank: time, memory, bytes and error.

This package contains the all-gather method and the code that computes the fp64 values. It imports ``attention``,
``engine`` and the packages below them. It loads adapters by name.
"""
