"""The cost of a ring before it exists: the cost model, measurements of the machine, and the choice of a ring size.

The model is arithmetic over a schedule. Only the probes compute and communicate, and no module here calls attention.
The package imports ``ring``, ``kernels`` and ``schedule``.
"""
