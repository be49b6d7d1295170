"""Predicts the cost of a ring: the cost model, measurements of the machine, and the choice of a ring size.

The model is arithmetic over a schedule. Only the probes compute and communicate. No module of this package calls
attention. The package imports ``ring``, ``kernels`` and ``schedule``.
"""
