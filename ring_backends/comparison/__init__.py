"""Measures one attention call by every adapter, by all-gather and on one rank: time, memory, bytes and error.

The all-gather method and the fp64 values that the comparison needs are here. The package imports ``attention``,
``engine`` and the rooms below it. It loads adapters by name.
"""
