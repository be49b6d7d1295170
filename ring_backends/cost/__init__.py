"""What a ring costs before it exists: the cost model, probes of the machine, and the choice of a ring size.

The model is arithmetic over a schedule; only the probes compute and communicate. Nothing here runs attention. It
imports ``ring``, ``kernels`` and ``schedule``.
"""
